"""A rank of FSDP bodies of several families: how far each is from transformers and PEFT in one piece.

python -m tests.trainers.bases_rank RANK WORLD DIRECTORY FAMILY …   (writes `DIRECTORY/WORLD-RANK.json`)
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from lorad.adapters.adapter import AdapterConfig
from lorad.errors import LoradError
from lorad.models.facts import read_facts
from lorad.trainers.fsdp.body import open_body
from lorad.trainers.fsdp.weights import weights
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.rows import sequences
from lorad.trainers.sharded.workers import join
from tests.conformance.reference import random_batch
from tests.models.bases import FAMILIES
from tests.models.on_peft import put_on_peft
from tests.trainers.real.fsdp_rank import CPU, Rank, far, loss

_FUSED = "mamba2_split_conv1d_scan_combined"
"""A kernel of GPUs that reads out_proj.weight itself, in training mode alone; it gives None on a CPU."""


class _FamilyRank(Rank):
    """A body of a family, and the class that config.json names in one piece."""

    def __init__(self, model: Path) -> None:
        self.settings = BodySettings(model=str(model), dtype="float32", device="cpu")
        self.body: Any = open_body(self.settings)
        self.reference = getattr(transformers, FAMILIES[model.name][0]).from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        self.samples = sequences(random_batch(1, groups=2))
        self.config = AdapterConfig(4, 6.0, tuple(sorted(self.body.shapes)))


def _about(rank: _FamilyRank, model: Path) -> dict[str, Any]:
    shortcuts: list[object] = []
    architecture = sys.modules[type(rank.reference).__module__]
    if hasattr(architecture, _FUSED):
        setattr(architecture, _FUSED, lambda *args, **_: shortcuts.append(len(args)))
    base = rank.logits(rank.samples, adapter=False)
    before = rank.body.checksum()
    answer: dict[str, Any] = {
        "parameters": sum(tensor.numel() for _, tensor in weights(rank.body.model))
        == read_facts(model).parameters,
        "linears": sorted(rank.body.shapes) == sorted(read_facts(model).linears),
        "base": far(base, rank.alone(rank.reference)),
    }
    numbers = rank.put(rank.config)
    whole, names = put_on_peft(rank.reference, rank.config, numbers)
    targets = torch.from_numpy(np.concatenate([s.tokens[s.targets] for s in rank.samples]))
    scores = rank.alone(whole)
    loss(scores, targets).backward()
    assert rank.mounted is not None
    expected = {name: whole.get_parameter(path).grad for name, path in names.items()}
    size = max(float(gradient.abs().max()) for gradient in expected.values())
    adapted = rank.logits(rank.samples)
    return answer | {
        "adapted": far(adapted, scores),
        "moves": far(adapted, base),
        "gradients": far(rank.gradient(rank.mine()), expected) / size,
        "unchanged": rank.body.checksum() == before,
        "shortcuts": len(shortcuts),
    }


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join(rank, world, directory / f"meeting{world}", CPU)
    answers: dict[str, Any] = {}
    for family in sys.argv[4:]:
        try:
            answers[family] = _about(_FamilyRank(directory / family), directory / family)
        except LoradError as error:
            answers[family] = {"error": f"{error} {error.hint}"}
        (directory / f"{world}-{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
