"""python experts_rank.py RANK WORLD DIRECTORY: what each expert-parallel rank of Megatron exports, as JSON.

DIRECTORY has `model`, a mixture. Each rank leaves `RANK.json` there: by kind of adapter, the names of the
tensors that were trained, those of its export, the export's digest and how many numbers are on this rank.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.validate import expected_shapes
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, OptimStep
from lorad.trainers.base import ExportSlot, OpenSlot, SlotSpec
from lorad.trainers.megatron.body import open_body
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.trainer import RankTrainer
from lorad.trainers.sharded.workers import join

KINDS: dict[str, tuple[Any, str]] = {
    "canonical": ("canonical_lora", ""),
    "fused": ("lora", ""),
    "one expert": ("canonical_lora", ".experts.3."),  # of the last rank: others have nothing to train
}


def batch(words: int, seed: int) -> tuple[Batch, PolicyTargets]:
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, words, 12).astype(np.int32) for _ in range(8)]
    made = Batch.of([(sample[:4], [sample[4:]]) for sample in samples])
    return made, PolicyTargets(rng.normal(size=made.completions.size).astype(np.float32))


def facts(trainer: RankTrainer, kind: str) -> dict[str, Any]:
    lora_type, part = KINDS[kind]
    modules = tuple(sorted(name for name in trainer.modules() if part in name))
    config = AdapterConfig(4, 8.0, modules)
    trainer.open(OpenSlot(kind, SlotSpec(config, lora_type=lora_type)))
    for seed in range(2):
        of, targets = batch(trainer.capabilities().vocab, seed)
        work = ForwardBackward(of, targets, PolicyLoss(), float(of.completions.size), kind)
        trainer.forward_backward(work)
        norm = trainer.optim_step(OptimStep(1e-2, 1.0, slot=kind)).grad_norm
    adapter = trainer.export(ExportSlot(kind))
    return {
        "trained": sorted(expected_shapes(config, trainer.modules())),
        "exported": sorted(adapter.tensors),
        "moved": sorted(name for name, tensor in adapter.tensors.items() if tensor.any()),
        "digest": adapter.digest(),
        "norm": norm,
        "here": sum(view.numel() for view in trainer.slots[kind].views(trainer.slots[kind].weights)),
    }


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    calls = join(rank, world, directory / f"meeting-{world}", torch.device("cpu"))
    about = {"model": str(directory / "model"), "dtype": "float32", "device": "cpu", "ep": world}
    trainer = RankTrainer(open_body(msgspec.convert(about, BodySettings)), calls, "base")
    told = {kind: facts(trainer, kind) for kind in KINDS}
    (directory / f"{world}-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
