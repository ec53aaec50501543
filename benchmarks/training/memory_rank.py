"""python memory_rank.py RANK WORLD DIRECTORY: the memory of one pass over one long sample on each rank.

DIRECTORY has `model` and `settings.json`, a `Settings`; the rank leaves `RANK.json` there, a `Figures`. It
imports nothing of the tests, since Megatron is in an environment of its own.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from lorad.adapters.adapter import AdapterConfig
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward
from lorad.trainers.base import OpenSlot, SlotSpec
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.rows import cut, pack, sequences, share
from lorad.trainers.sharded.trainer import RankTrainer
from lorad.trainers.sharded.workers import join

WARM = 64  # tokens of a pass that is not measured
KB = 1024


class Settings(msgspec.Struct):
    """rows: of a chunk of logits; None: lorad's own choice. headless: the pass ends at the last hidden state.
    tokens: of a sample, of which each data-parallel rank has one.
    """

    backend: str
    tp: int
    tokens: int
    rows: int | None = None
    headless: bool = False
    cp: int = 1


class Figures(msgspec.Struct):
    """bytes: by which the process grew at most during the pass."""

    bytes: int
    seconds: float
    loss: float = 0.0


def status(name: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KB for line in lines if line.startswith(f"{name}:"))


def batch(tokens: int, count: int, vocab: int) -> Batch:
    rng = np.random.default_rng(tokens)
    made = [rng.integers(0, vocab, tokens).astype(np.int32) for _ in range(count)]
    return Batch.of([(one[:1], [one[1:]]) for one in made])


class Passes:
    """A trainer with a slot on the linears of its layers."""

    def __init__(self, trainer: RankTrainer, settings: Settings) -> None:
        self.trainer, self.settings, self.body = trainer, settings, trainer._body
        modules = tuple(name for name in sorted(trainer.modules()) if name != "lm_head")
        spec = SlotSpec(
            AdapterConfig(8, 16.0, modules), tokens_per_microbatch=10**6, activation_checkpointing=True
        )
        trainer.open(OpenSlot("a", spec))

    def once(self, tokens: int) -> float:
        """Return the loss of a pass forward and backward."""
        cp, dp = self.body.cp, self.body.dp
        of = batch(tokens, dp.size // cp.size, self.body.vocab)
        if self.settings.headless:
            row = pack(share(sequences(of), dp.rank // cp.size, dp.size // cp.size), self.body.device)
            row = row if cp.size == 1 else cut(row, cp)
            states = self.body.states(row, adapter=True, train=True, recompute=True)
            states.sum().backward()
            return 0.0
        targets = PolicyTargets(np.ones(of.completions.size, np.float32))
        work = ForwardBackward(of, targets, PolicyLoss(surrogate="linear"), float(tokens), "a")
        return self.trainer.forward_backward(work).loss

    def measured(self) -> Figures:
        """Reset the peak of the process after a short pass, and read it after the long one."""
        self.once(WARM)
        Path("/proc/self/clear_refs").write_text("5")
        before, began = status("VmRSS"), time.monotonic()
        loss = self.once(self.settings.tokens)
        return Figures(status("VmHWM") - before, time.monotonic() - began, loss)


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    settings = msgspec.json.decode((directory / "settings.json").read_bytes(), type=Settings)
    if settings.rows is not None:
        from lorad.trainers import head_rows  # which lorad has not always had

        head_rows.LOGITS, head_rows.ROWS = 1, settings.rows
    calls = join(rank, world, directory / "meeting", torch.device("cpu"))
    about = BodySettings(
        model=str(directory / "model"), dtype="float32", device="cpu", tp=settings.tp, cp=settings.cp
    )
    opener: Any = importlib.import_module(f"lorad.trainers.{settings.backend}.body")
    passes = Passes(RankTrainer(opener.open_body(about), calls, "base"), settings)
    (directory / f"{rank}.json").write_bytes(msgspec.json.encode(passes.measured()))


if __name__ == "__main__":
    main()
