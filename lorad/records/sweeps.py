"""A sweep, and how it is halved."""

from msgspec import Struct

from lorad.records.measured import Number
from lorad.records.runs import Run

LOWER_IS_BETTER = ("nll", "loss")  # metrics of halving


class Halving(Struct, frozen=True):
    eta: Number
    rungs: list[int]
    metric: str  # eval | nll | reward | loss
    asha: bool = False  # each run is decided about as it reaches a rung


class Rung(Struct, frozen=True):
    step: int
    kept: list[str] = []
    stopped: list[str] = []
    scores: dict[str, Number | None] = {}
    at: float = 0.0


class SweepRun(Run, frozen=True):
    eval_best: float | None = None
    reward_mean: float | None = None  # of the last five steps
    loss_mean: float | None = None  # likewise


class Sweep(Struct, frozen=True):
    sweep: str
    owner: str = ""
    owner_uid: int = -1
    created_at: float = 0.0
    grid: dict[str, list[str]] = {}
    halving: Halving | None = None
    rungs: list[Rung] = []
    runs: list[SweepRun] = []


class StartedSweep(Sweep, frozen=True):
    warnings: list[str] = []
