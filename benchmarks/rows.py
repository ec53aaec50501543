"""The table of `make bench`: what is compared with what, and what is wanted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SIDES = ("lorad", "peer")


@dataclass(frozen=True)
class Measure:
    """A module and the case of it that is measured; repeats: how many for each one that was asked for."""

    module: str
    case: str = ""
    sides: tuple[str, ...] = SIDES
    repeats: float = 1.0
    models: tuple[str, ...] = ()

    def command(self, side: str) -> list[str]:
        return [f"benchmarks.{self.module}", f"{side}-{self.case}" if self.case else side]


Judgement = Literal["times less", "times more", "share", "cost", "at most"]


@dataclass(frozen=True)
class Row:
    """One line of the table. lorad, peer: names of figures, medians over all rounds.

    "times less" and "times more": how many times lorad's figure is smaller or larger than the peer's, at
    least target. "share": lorad's of the peer's, at least target. "cost": lorad's over the peer's, at most
    target. "at most": lorad's own figure, at most target. A row without target is for information.
    """

    what: str
    measure: str
    lorad: str
    judgement: Judgement
    peer: str = ""
    peer_name: str = ""
    target: float | None = None
    stretch: float | None = None
    unit: float = 1.0  # figures are divided by it
    peer_side: str = "peer"

    def ratio(self, lorad: float, peer: float | None) -> float | None:
        if peer is None:
            return None
        return peer / lorad if self.judgement == "times less" else lorad / peer

    def reached(self, lorad: float, ratio: float | None, goal: float | None) -> bool | None:
        if goal is None:
            return None
        if self.judgement == "at most":
            return lorad <= goal
        assert ratio is not None
        return ratio <= goal if self.judgement == "cost" else ratio >= goal


MEASURES: Mapping[str, Measure] = {
    "products": Measure("rollout.products", "", ("lorad",), 0.15),
    "step": Measure("training.grpo_step"),
    "rollout": Measure("rollout.rollout", "tiny"),
    "uneven": Measure("rollout.uneven", repeats=0.25),
    "rollout-100m": Measure("rollout.rollout", "fp32", repeats=0.25, models=("100m",)),
    "rollout-100m-bf16": Measure("rollout.rollout", "bf16", repeats=0.2, models=("100m",)),
    "decode": Measure("rollout.decode", "fp32", ("lorad",), 0.25, ("100m",)),
    "decode-bf16": Measure("rollout.decode", "bf16", ("lorad",), 0.2, ("100m",)),
    "train": Measure("training.train_step", "fp32", repeats=0.2, models=("100m",)),
    "train-bf16": Measure("training.train_step", "bf16", repeats=0.2, models=("100m",)),
    "mixed-r8": Measure("rollout.mixed", "r8", ("lorad",), 0.5),
    "mixed-r16": Measure("rollout.mixed", "r16", ("lorad",), 0.5),
    "publish": Measure("training.publish", "", ("lorad",), 1.0, ("100m",)),
    "share": Measure("training.own_share", "", ("lorad",), 4.0),
    "threshold": Measure("training.threshold", "", ("lorad",)),
}

MS, GB, GFLOP = 1e-3, 1e9, 1e9
DEFECT = "generate + PEFT, with its lm_head defect"
MENDED = "generate + PEFT, lm_head mended"
CLEAN = "PEFT + autograd, lm_head mended"


def limit(what: str, measure: str, lorad: str, peer: str, **goals: float) -> Row:
    """A share of what the machine can do, which lorad's side measured itself."""
    unit = GB if peer == "gemv" else GFLOP
    return Row(what, measure, lorad, "share", peer, peer, unit=unit, peer_side="lorad", **goals)


def inside(what: str, measure: str, judgement: Judgement, peer: str, name: str, **goals: float) -> Row:
    """Two ways of lorad itself, compared in CPU milliseconds."""
    return Row(what, measure, "mixed", judgement, peer, name, unit=MS, peer_side="lorad", **goals)


ROWS: Sequence[Row] = (
    Row("products: the form here over the quickest, worst shape", "products", "worst", "at most", target=1.4),
    Row("  the rule's form over it, mean of the shapes", "products", "won", "at most"),
    Row("GRPO step, tiny, 16x8, CPU ms", "step", "step", "times less", "step", "TRL", 2.8, 3.5, MS),
    Row("  its rollout, CPU ms", "step", "rollout", "times less", "rollout", "TRL", unit=MS),
    Row("  the rest, CPU ms", "step", "rest", "times less", "rest", "TRL", unit=MS),
    Row("  mean reward of all its steps", "step", "reward", "times more", "reward", "TRL"),
    Row("rollout, tiny, B=128, tok/s", "rollout", "rate", "times more", "rate", "generate + PEFT", 1.8, 2.3),
    Row(
        "rollout, 100 M fp32, B=32, tok/s",
        "rollout-100m",
        "rate",
        "times more",
        "rate",
        "generate + PEFT",
        1.4,
        2.3,
    ),
    Row("  same", "rollout-100m", "rate", "times more", "mended", MENDED),
    Row("rollout, 100 M bf16, B=32, tok/s", "rollout-100m-bf16", "rate", "times more", "rate", DEFECT),
    Row("  same", "rollout-100m-bf16", "rate", "times more", "mended", MENDED),
    Row("uneven lengths, tiny, tok/s", "uneven", "rate", "times more", "rate", "generate + PEFT", 2.5, 3.0),
    limit("decode, 100 M fp32, B=1, GB/s", "decode", "one", "gemv", target=0.55, stretch=0.65),
    limit("  with LoRA", "decode", "one_lora", "gemv"),
    limit("decode, 100 M fp32, B=128, GFLOP/s", "decode", "many", "gemm", target=0.75, stretch=0.85),
    limit("  with LoRA", "decode", "many_lora", "gemm"),
    Row(
        "decode, 100 M bf16, B=128, GFLOP/s",
        "decode-bf16",
        "many",
        "share",
        "gemm",
        "gemm",
        None,
        None,
        GFLOP,
        "lorad",
    ),
    Row("decode, 100 M bf16, B=32, LoRA, tok/s", "decode-bf16", "some_lora", "at most"),
    limit("train step, 100 M fp32, GFLOP/s", "train", "flops", "gemm", target=0.75),
    Row("  CPU s", "train", "step", "times less", "step", "PEFT + autograd", 1.8, None),
    Row("  CPU s", "train", "step", "times less", "mended", CLEAN),
    limit("train step, 100 M bf16, GFLOP/s", "train-bf16", "flops", "gemm"),
    Row("  CPU s", "train-bf16", "step", "times less", "step", "PEFT + autograd", None, 2.5),
    Row("  CPU s", "train-bf16", "step", "times less", "mended", CLEAN),
    Row(
        "8 adapters r=8 mixed, B=128, CPU ms",
        "mixed-r8",
        "mixed",
        "cost",
        "base",
        "no adapter",
        1.3,
        None,
        MS,
        "lorad",
    ),
    inside("  against them one after another", "mixed-r8", "times less", "separate", "8 batches", target=2.5),
    Row(
        "8 adapters r=16 mixed, B=128, CPU ms",
        "mixed-r16",
        "mixed",
        "cost",
        "base",
        "no adapter",
        1.3,
        None,
        MS,
        "lorad",
    ),
    inside(
        "  against them one after another", "mixed-r16", "times less", "separate", "8 batches", target=2.5
    ),
    Row("publish, 100 M r=16, in process, CPU ms", "publish", "memory_ms", "at most", target=5.0),
    Row("publish, through files, CPU ms", "publish", "files_ms", "at most", target=25.0),
    Row("  wall ms", "publish", "files_wall_ms", "at most"),
    Row("lorad's own share of a step, tiny, %", "share", "own_percent", "at most", target=10.0, stretch=5.0),
    Row("  driver, CPU ms", "share", "driver_ms", "at most"),
    Row("  daemon, CPU ms", "share", "daemon_ms", "at most"),
    Row("  pool's event loop, CPU ms", "share", "loop_ms", "at most"),
    Row("  pool's digests and version files, CPU ms", "share", "helpers_ms", "at most"),
    Row("  computing, CPU ms", "share", "compute_ms", "at most"),
    Row("  attestation (in none of the above), CPU ms", "share", "attest_ms", "at most"),
    Row("steps to held-out greedy 0.9, tiny, CPU s", "threshold", "seconds", "at most", target=5.0),
    Row("  how many", "threshold", "steps", "at most"),
)
