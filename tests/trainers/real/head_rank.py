"""python head_rank.py RANK WORLD DIRECTORY BACKEND DTYPE: one gradient by chunks of several sizes, as JSON.

DIRECTORY has `model`, whose head is no embedding; megatron cuts it over WORLD ranks, fsdp gives each samples
of its own. Each rank leaves `RANK.json` there: for each size of a chunk, how far the result is from that of
one chunk, and the largest tensor that was made.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorad.adapters.adapter import AdapterConfig
from lorad.protocol.batch import Batch, Optimizer, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, OptimStep
from lorad.trainers import head_rows
from lorad.trainers.base import DiscardGrads, OpenSlot, Policy, Predict, SlotSpec
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.rows import sequences, share
from lorad.trainers.sharded.trainer import RankTrainer
from lorad.trainers.sharded.workers import join

WORDS, WHOLE = 3001, 10**6
SIZES = (WHOLE, 64, 7, 1)
LOSSES = {
    "token": PolicyLoss(temperature=0.7, entropy_coef=0.05),
    "sequence": PolicyLoss(temperature=1.3, ratio="sequence", anchor="sampler", clip_low=0.9, clip_high=9.0),
}


class Watch(TorchDispatchMode):
    """Notes the largest result of all operations, of backward ones too, and how often shards are gathered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widest = self.gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.gathers += "allgather" in str(func).replace("_", "")
        made = [_numbers(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.widest = max([self.widest, *made])
        return found


def _numbers(tensor: Tensor) -> int:
    """Return how many numbers lie in the memory of a tensor, which may be a view."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def batch() -> Batch:
    rng = np.random.default_rng(3)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, WORDS, count).astype(np.int32)

    return Batch.of([(tokens(3), [tokens(int(n)) for n in rng.integers(14, 21, 4)]) for _ in range(2)])


def targets(of: Batch) -> PolicyTargets:
    rng = np.random.default_rng(4)
    each = np.repeat(rng.normal(size=of.completion_lengths.size), of.completion_lengths).astype(np.float32)
    return PolicyTargets(each, np.full(of.completions.size, -7.0, np.float32))


class Trained:
    """A trainer with one slot, on every linear or on the head alone, whose A and B both have gradients."""

    def __init__(self, trainer: RankTrainer, slot: str, modules: tuple[str, ...]) -> None:
        self.trainer, self.slot, self.batch = trainer, slot, batch()
        spec = SlotSpec(AdapterConfig(4, 8.0, modules), optimizer=Optimizer(), tokens_per_microbatch=10**6)
        trainer.open(OpenSlot(slot, spec))
        self.gradient(LOSSES["token"])
        trainer.optim_step(OptimStep(0.02, 0.0, slot=slot))

    def gradient(self, loss: PolicyLoss) -> tuple[Tensor, dict[str, Any]]:
        work = ForwardBackward(self.batch, targets(self.batch), loss, 50.0, self.slot)
        found = self.trainer.forward_backward(work)
        grads = self.trainer.slots[self.slot].grads.clone()
        self.trainer.discard_grads(DiscardGrads(self.slot))
        return grads, msgspec.structs.asdict(found)

    def facts(self, loss: PolicyLoss) -> dict[str, Any]:
        with Watch() as watch:
            grads, stats = self.gradient(loss)
            said = self.trainer.predictions(Predict(Policy(self.slot), self.batch, loss.temperature))
        return {"grads": grads, "logprobs": said.logprobs, "stats": stats, "watch": watch}


def compared(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    grads, watch = whole["grads"], found["watch"]
    stats = [abs(found["stats"][name] - whole["stats"][name]) for name in ("loss", "entropy", "kl", "ratio")]
    return {
        "grads": float((found["grads"] - grads).norm() / grads.norm()),
        "logprobs": float(np.abs(found["logprobs"] - whole["logprobs"]).max()),
        "stats": max(stats),
        "widest": watch.widest,
        "gathers": watch.gathers,
    }


def main() -> None:
    rank, world, directory, backend = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    calls = join(rank, world, directory / "meeting", torch.device("cpu"))
    tp = world if backend == "megatron" else 1
    about = {"model": str(directory / "model"), "dtype": sys.argv[5], "device": "cpu", "tp": tp}
    settings = msgspec.convert(about, BodySettings)
    body = importlib.import_module(f"lorad.trainers.{backend}.body").open_body(settings)
    trainer = RankTrainer(body, calls, "base")
    mine = share(sequences(batch()), body.dp.rank, body.dp.size)
    told: dict[str, Any] = {"logits": sum(s.targets.size for s in mine) * (WORDS // tp)}
    everywhere = Trained(trainer, "a", tuple(sorted(trainer.modules())))
    of_head = Trained(trainer, "b", ("lm_head",))
    for name, trained, loss in (
        *((name, everywhere, loss) for name, loss in LOSSES.items()),
        ("head", of_head, LOSSES["token"]),
    ):
        made = {}
        for size in SIZES:
            head_rows.LOGITS, head_rows.ROWS = 1, size
            made[size] = trained.facts(loss)
        told[name] = {str(size): compared(found, made[WHOLE]) for size, found in made.items()}
    (directory / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
