"""One rank of an FSDP body: how far it is from transformers and PEFT in one piece, as JSON in a file.

python -m tests.trainers.real.fsdp_rank RANK WORLD DIRECTORY   (`dense`, `experts` and `scaled` are models)
"""

import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from lorad.adapters.adapter import AdapterConfig
from lorad.errors import LoradError
from lorad.rl.loss import TokenLogprobs
from lorad.trainers.fsdp.body import open_body
from lorad.trainers.sharded.body import BodySettings, Mounted, MountKey
from lorad.trainers.sharded.head import RowLoss
from lorad.trainers.sharded.rows import Sample, pack, sequences, share
from lorad.trainers.sharded.workers import join
from tests.conformance.reference import random_batch, reference_model

CPU = torch.device("cpu")


class Rank:
    """A body, and the same model in one piece."""

    def __init__(self, model: Path) -> None:
        self.settings = BodySettings(model=str(model), dtype="float32", device="cpu")
        self.body: Any = open_body(self.settings)
        self.model, self.reference = model, reference_model(model)
        self.samples = sequences(random_batch(1, groups=2))
        # PEFT, the judge here, has no pairs for single experts; see `conformance/trainer_experts.py`
        modules = tuple(sorted(name for name in self.body.shapes if ".experts." not in name))
        self.config = AdapterConfig(4, 6.0, modules)
        self.mounted: Mounted | None = None

    def logits(self, samples: Sequence[Sample], *, adapter: bool = True, train: bool = False) -> Tensor:
        rows = [samples] if self.body.packs else [[sample] for sample in samples]
        found: list[Tensor] = []
        with torch.no_grad():
            for row in rows:
                self.body.states(
                    pack(row, CPU),
                    adapter=adapter,
                    train=train,
                    recompute=False,
                    visit=lambda states, head: found.append(head.scores(states)),
                )
        return torch.cat(found)

    def alone(self, model: Any) -> Tensor:
        """Score all samples one by one, with a gradient."""
        inputs = [
            (torch.from_numpy(s.tokens[None, :-1].astype(np.int64)), int(s.targets[0]) - 1)
            for s in self.samples
        ]
        return torch.cat([model(input_ids=ids).logits[0, start:] for ids, start in inputs])

    def put(self, config: AdapterConfig, *, zero_b: bool = False) -> dict[str, np.ndarray]:
        """Random numbers, equal on all ranks."""
        self.mounted = self.body.mount(MountKey(config))
        rng = np.random.default_rng(5)
        names = self.mounted.gather(self.mounted.parameters)
        made = {n: rng.normal(0, 0.2, tuple(t.shape)).astype(np.float32) for n, t in names.items()}
        made = {n: 0 * a if zero_b and "lora_B" in n else a for n, a in made.items()}
        for parameter, part in zip(self.mounted.parameters, self.mounted.scatter(made), strict=True):
            parameter.data.copy_(part)
        return made

    def gradient(self, mine: Sequence[Sample], *, recompute: bool = False) -> dict[str, Tensor]:
        """Summed over ranks."""
        assert self.mounted is not None
        for parameter in self.mounted.parameters:
            parameter.grad = None
        torch.manual_seed(3)
        rows = [mine] if self.body.packs else [[sample] for sample in mine]
        rows += [[]] * (self.body.dp.most(len(rows), CPU) - len(rows))
        for row in rows:
            packed = pack(row, CPU)
            self.body.backward(packed, Likelihood(), recompute=recompute)
        grads = [self.body.dp.add_up(p.grad.clone()) for p in self.mounted.parameters if p.grad is not None]
        return self.mounted.gather(grads)

    def mine(self) -> list[Sample]:
        return share(self.samples, self.body.dp.rank, self.body.dp.size)

    def peft(self, config: AdapterConfig, tensors: Mapping[str, np.ndarray]) -> Any:
        settings = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            use_rslora=config.rslora,
            target_modules=list(config.modules),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(reference_model(self.model), settings).eval()
        state = {_name(logical): array for logical, array in tensors.items()}
        for name, parameter in model.named_parameters():
            parameter.data = torch.from_numpy(state.pop(name)) if name in state else parameter.data
        assert not state
        return model


class Likelihood(RowLoss):
    def of(self, likely: TokenLogprobs, tokens: slice) -> Tensor:
        return -likely.logprobs.sum() / 30


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return -scores.log_softmax(-1).gather(-1, targets[:, None]).sum() / 30


def far(a: Any, b: Any) -> float:
    if isinstance(a, Tensor):
        return float((a - b).detach().abs().max())
    assert a.keys() == b.keys()
    return max(far(a[name], torch.as_tensor(b[name])) for name in a)


def about_the_base(rank: Rank) -> dict[str, Any]:
    body, base = rank.body, rank.logits(rank.samples, adapter=False)
    shards = [p.to_local().numel() for p in body.model.parameters() if isinstance(p, DTensor)]
    before = body.checksum()
    for _ in range(2):  # the second time the host has it
        body.offload()
        body.onload()
    return {
        "shapes": body.shapes,
        "packs": body.packs,
        "parameters": [
            body.parameter_count,
            sum(p.numel() for p in rank.reference.parameters()),
            sum(shards),
        ],
        "base": far(base, rank.alone(rank.reference)),
        "packed": far(base, torch.cat([rank.logits([s], adapter=False) for s in rank.samples])),
        "moved": far(base, rank.logits(rank.samples, adapter=False)),
        "moved_checksum": body.checksum() == before,
    }


def about_gradients(rank: Rank) -> dict[str, Any]:
    base, before = rank.logits(rank.samples, adapter=False), rank.body.checksum()
    rank.put(rank.config, zero_b=True)
    found: dict[str, Any] = {"zero_b": far(base, rank.logits(rank.samples, train=True))}
    numbers = rank.put(rank.config)
    whole = rank.peft(rank.config, numbers)
    loss(
        rank.alone(whole), torch.from_numpy(np.concatenate([s.tokens[s.targets] for s in rank.samples]))
    ).backward()
    expected = rank.mounted.gather([whole.get_parameter(_name(n)).grad for n in numbers])  # type: ignore[union-attr]
    found |= {
        "logits": far(rank.logits(rank.samples), rank.alone(whole)),
        "off": far(base, rank.logits(rank.samples, adapter=False)),
        "summed": far(rank.gradient(rank.mine()), expected),
        "one_works": far(rank.gradient(rank.samples if rank.body.dp.rank == 0 else []), expected),
        "greatest": max(float(g.abs().max()) for g in expected.values()),
        "recomputed": far(rank.gradient(rank.mine(), recompute=True), expected),
        "checksum": rank.body.checksum() == before,
    }
    return found


def about_other_adapters(rank: Rank) -> dict[str, Any]:
    """Mounted after one was trained."""
    base = rank.logits(rank.samples, adapter=False)
    one = tuple(name for name in rank.config.modules if name.startswith("model.layers.1."))
    config = AdapterConfig(2, 3.5, one, rslora=True)
    numbers = rank.put(config)
    assert rank.mounted is not None
    found: dict[str, Any] = {
        "round_trip": far(rank.mounted.gather(rank.mounted.parameters), numbers),
        "names": [
            sorted(numbers) == sorted(f"{m}.lora_{half}.weight" for m in one for half in "AB"),
            len(one),
        ],
        "remounted": far(rank.logits(rank.samples), rank.alone(rank.peft(config, numbers))),
    }
    rank.put(AdapterConfig(4, 6.0, rank.config.modules, dropout=0.5))
    plain, torch_seeded = rank.gradient(rank.mine()), rank.gradient(rank.mine(), recompute=True)
    found["dropped_recomputed"] = far(plain, torch_seeded)
    found["dropped"] = far(rank.logits(rank.samples), rank.logits(rank.samples, train=True))
    rank.put(AdapterConfig(4, 6.0, rank.config.modules))
    found["dropped_differs"] = far(plain, rank.gradient(rank.mine()))
    found["unknown"] = refusal(
        lambda: rank.body.mount(MountKey(AdapterConfig(1, 1, ("model.layers.99.q_proj",))))
    )
    found["after_refusal"] = far(base, rank.logits(rank.samples))
    return found


def refusal(act: Any) -> str:
    try:
        act()
    except LoradError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _name(logical: str) -> str:
    return f"base_model.model.{logical.removesuffix('weight')}default.weight"


def main() -> None:
    logging.basicConfig(level="INFO", format="%(message)s")
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join(rank, world, directory / f"meeting{world}", CPU)
    found: dict[str, Any] = {}
    for model in ("dense", "experts", "scaled"):
        one = Rank(directory / model)
        found[model] = about_the_base(one) | about_gradients(one) | about_other_adapters(one)
    for key, value in (("tp", 2), ("args", {"colour": "red"})):
        found[key] = refusal(lambda key=key, value=value: open_body(_with(one.settings, key, value)))
    (directory / f"{world}-{rank}.json").write_text(json.dumps(found))


def _with(settings: BodySettings, key: str, value: object) -> BodySettings:
    return msgspec.structs.replace(settings, **{key: value})


if __name__ == "__main__":
    main()
