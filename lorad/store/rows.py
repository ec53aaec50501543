"""The rows of the database as the store returns them: one frozen Struct for each table."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lorad.box.paths import AttemptDir, RunDir
from lorad.protocol.evals import SetScore, figures
from lorad.states import EndReason, RunState
from lorad.store.record import Row


class Rates(Struct, frozen=True):
    """How fast the last step was; None before the first one."""

    tokens_per_second: float | None = None
    step_seconds: float | None = None


class RunSummary(Struct, frozen=True, kw_only=True, eq=False):
    """What a list shows of a run. Its spec is larger than all of this, and stays on disk.

    Rows that did not change since they were read before are the same objects (`run_summary`).

    base: the model of its spec.
    waiting: why it is queued.
    pool: where its newest attempt was placed.
    reward: the mean of the last step.
    version: the number of the current version.
    started_at: when it was first placed.
    ended_at: None until it ended.
    origin: the `run@version` or directory that it came from.
    sweep: the sweep that it is a point of.
    serving: a pool of its base stays up.
    wanted: what its owner asked for and its driver has not done yet.
    preempted: the run that it makes, or made, room for.
    yielded: why it gives, or gave, its device back where that is for no other run.
    tags, note: what its owner wrote on it.
    queue_group: the group of which so many runs work at a time.
    signals, recent: JSON that goes to clients as it is.
    """

    name: str
    owner: str = ""
    owner_uid: int
    base: str = ""
    state: RunState
    reason: EndReason | None = None
    detail: str = ""
    waiting: str = ""
    priority: int = 0
    pool: str | None = None
    attempt: int = 0
    step: int = 0
    steps: int = 0
    reward: float | None = None
    eval_first: float | None = None
    eval_last: float | None = None
    nll_first: float | None = None
    nll_last: float | None = None
    accuracy_last: float | None = None
    token_accuracy_last: float | None = None
    version: int | None = None
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    origin: str | None = None
    sweep: str | None = None
    serving: bool = False
    wanted: Literal["pause", "stop", "kill"] | None = None
    preempted: str | None = None
    yielded: str | None = None
    tags: list[str] = []
    note: str = ""
    queue_group: str | None = None
    rates: Rates = Rates()
    signals: msgspec.Raw = msgspec.Raw(b"{}")
    recent: msgspec.Raw = msgspec.Raw(b"[]")


class RunRow(RunSummary, frozen=True, kw_only=True, eq=True):
    """A run.

    spec: its spec as JSON text.
    resume_step: the checkpoint that its next attempt begins with.
    restart_at: when it may be placed again after an automatic restart.
    """

    spec: str
    directory: str
    resume_step: int | None = None
    restart_at: float | None = None

    @property
    def dir(self) -> RunDir:
        """Return its directory, with the names of what is in it."""
        return RunDir(Path(self.directory))

    @property
    def attempt_dir(self) -> AttemptDir:
        """Return the directory of its present attempt."""
        return self.dir.attempt(self.attempt)


class QueuedRow(Struct, frozen=True):
    """What the order of the queue depends on, and why a run waits."""

    name: str
    owner_uid: int
    priority: int
    waiting: str
    owner: str = ""


class GroupRow(Struct, frozen=True, kw_only=True):
    """A group of runs of one owner.

    limit: how many of them may work at a time; None is no limit.
    """

    owner_uid: int
    name: str
    limit: int | None
    working: int
    queued: int


class ReservationRow(Struct, frozen=True, kw_only=True):
    """A device that a user keeps from lorad.

    device: the UUID of a GPU, or the name of a slot of the CPU.
    seconds: how long it lasts from its beginning; None: until `until`, or until it is released.
    until: Unix time; None until it has begun, or until it is released.
    began_at: since when nothing of lorad is there; None before.
    urgent: the runs there are asked to stop at their next step.
    """

    device: str
    owner: str
    owner_uid: int
    why: str
    made_at: float
    seconds: float | None = None
    until: float | None = None
    began_at: float | None = None
    urgent: bool = False


class AttemptRow(Struct, frozen=True, kw_only=True):
    """An attempt of a run.

    resumed_from: the step of the checkpoint that it began with.
    detail: why it ended.
    """

    attempt: int
    started_at: float
    ended_at: float | None
    resumed_from: int | None
    exit_code: int | None
    signal: int | None
    reason: str | None
    detail: str


class VersionRow(Struct, frozen=True, kw_only=True):
    """A version of an adapter: immutable but for what is said about it.

    lineage: False when a rewind passed it.
    owner_uid: of the run.
    path: absolute.
    aliases: those that serve it.
    """

    run: str
    version: int
    attempt: int = 0
    step: int = 0
    created_at: float = 0.0
    sha256: str
    parent: int | None = None
    rank: int = 0
    alpha: float = 0.0
    bytes: int = 0
    attested: str = ""
    attestation: str = ""
    pinned: bool = False
    lineage: bool = True
    owner_uid: int
    path: str
    aliases: list[str] = []

    @property
    def name(self) -> str:
        return f"{self.run}@{self.version}"


def version_row(raw: Row) -> VersionRow:
    decoded = {
        "pinned": bool(raw["pinned"]),
        "lineage": bool(raw["lineage"]),
        "aliases": msgspec.json.decode(raw["aliases"], type=list[str]),
    }
    return VersionRow(**raw | decoded)


class CheckpointRow(Struct, frozen=True, kw_only=True):
    """A checkpoint that a run can resume from.

    path: absolute.
    """

    run: str
    step: int
    attempt: int
    version: int
    path: str
    bytes: int
    created_at: float


class CheckpointPlace(Struct, frozen=True, kw_only=True):
    """Where the files of a checkpoint should be.

    path: an absolute path.
    """

    run: str
    step: int
    attempt: int
    path: str


class StepRow(Struct, frozen=True, kw_only=True):
    """A step that counts.

    samples: the file of its samples, below the run's directory.
    """

    step: int
    attempt: int
    at: float
    version: int
    samples: str
    metrics: dict[str, Any]


def step_row(raw: Row) -> StepRow:
    return StepRow(**raw | {"metrics": msgspec.json.decode(raw["metrics"])})


class EvalRow(Struct, frozen=True, kw_only=True):
    """An evaluation that counts.

    problems: how many were tried.
    failed: those whose reward could not be computed.
    nll, accuracy, token_accuracy, sets, samples: see `EvalFact`.
    """

    step: int
    attempt: int
    at: float
    version: int
    score: float | None
    problems: int
    failed: int
    nll: float | None
    accuracy: float | None
    token_accuracy: float | None
    sets: dict[str, SetScore] = {}
    samples: str = ""
    samples_sha256: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """Return what was measured, by name."""
        return figures(self.score, self.nll, self.accuracy, self.sets)


def eval_row(raw: Row) -> EvalRow:
    return EvalRow(**raw | {"sets": msgspec.json.decode(raw["sets"], type=dict[str, SetScore])})


class ResultRow(Struct, frozen=True, kw_only=True):
    """What a version came to when somebody evaluated it.

    sha256: of its tensors; another version with the same ones has the same results.
    by: who asked.
    suite: `data` for rows, else the suite.
    data: the rows, or the task of the suite.
    settings: reward, sampling and the like.
    metrics: figures by name.
    """

    id: int
    sha256: str
    run: str
    version: int
    at: float
    by: str
    suite: str
    data: str
    settings: dict[str, Any]
    metrics: dict[str, float]
    problems: int
    failed: int


def result_row(raw: Row) -> ResultRow:
    decoded = {key: msgspec.json.decode(raw[key]) for key in ("settings", "metrics")}
    return ResultRow(**raw | decoded)


class PoolRow(Struct, frozen=True, kw_only=True):
    """A pool whose process is up.

    key: what a run must ask for to join.
    idle_since: None while a run uses it.
    """

    pool: str
    state: str
    model: str
    mode: str
    device: str
    pid: int | None
    attempt: int
    key: str
    detail: str
    created_at: float
    idle_since: float | None


class LeaseRow(Struct, frozen=True, kw_only=True):
    """A device that a pool holds."""

    device: str
    pool: str
    why: str
    taken_at: float
    node: str = ""  # "": this machine


class AliasRow(Struct, frozen=True, kw_only=True):
    """A name that serves a version.

    owner_uid: who made it.
    by: who moved it last.
    sha256, attested: of the version.
    """

    alias: str
    run: str
    version: int
    updated_at: float
    owner_uid: int
    sha256: str
    attested: str
    by: str | None

    @property
    def serves(self) -> str:
        """Return the name of the version."""
        return f"{self.run}@{self.version}"


class AliasMoveRow(Struct, frozen=True, kw_only=True):
    """A move of an alias; run and version are None where it was removed."""

    alias: str
    run: str | None
    version: int | None
    at: float
    by: str


class EventRow(Struct, frozen=True, kw_only=True):
    """Something that happened.

    at: Unix time.
    run: the run that it is about, if any; it may be removed by now.
    """

    id: int
    at: float
    run: str | None
    kind: str
    data: dict[str, Any]


def event_row(raw: Row) -> EventRow:
    return EventRow(**raw | {"data": msgspec.json.decode(raw["data"])})


class Halving(Struct, frozen=True):
    """How a sweep is halved.

    eta: a rung keeps one run in so many.
    rungs: their steps.
    metric: `eval` or `reward`.
    asha: each run is decided about as it reaches a rung.
    """

    eta: float
    rungs: list[int]
    metric: str
    asha: bool = False


class Rung(Struct, frozen=True):
    """What was decided at a rung.

    kept, stopped: names of runs.
    scores: by run; None for a run without one.
    at: Unix time.
    """

    step: int
    kept: list[str]
    stopped: list[str]
    scores: dict[str, float | None]
    at: float


class SweepRow(Struct, frozen=True, kw_only=True):
    """A grid of runs.

    grid: the values of each key, as text.
    rungs: those that are decided, in order.
    """

    sweep: str
    owner: str
    owner_uid: int
    created_at: float
    grid: dict[str, list[str]]
    halving: Halving | None
    rungs: list[Rung]


def sweep_row(raw: Row) -> SweepRow:
    halving = raw["halving"]
    decoded = {
        "grid": msgspec.json.decode(raw["grid"], type=dict[str, list[str]]),
        "halving": None if halving is None else msgspec.json.decode(halving, type=Halving),
        "rungs": msgspec.json.decode(raw["rungs"], type=list[Rung]),
    }
    return SweepRow(**raw | decoded)


_DECODED = frozenset({"state", "reason", "serving", "tags", "rates", "signals", "recent"})
_SUMMARY = tuple(field for field in RunSummary.__struct_fields__ if field not in _DECODED)
_ROW = tuple(field for field in RunRow.__struct_fields__ if field not in _DECODED)
SUMMARY_COLUMNS = (*_SUMMARY, *sorted(_DECODED - {"rates"}), "tokens_per_second", "step_seconds")


@lru_cache(maxsize=2048)
def run_summary(values: tuple[Any, ...]) -> RunSummary:
    """Decode the values of SUMMARY_COLUMNS; those of a run that did not change since were decoded before."""
    raw = dict(zip(SUMMARY_COLUMNS, values, strict=True))
    return RunSummary(**_decoded(raw), **{field: raw[field] for field in _SUMMARY})


def run_row(raw: Row) -> RunRow:
    return RunRow(**_decoded(raw), **{field: raw[field] for field in _ROW})


def _decoded(raw: Row) -> dict[str, Any]:
    return {
        "state": RunState(raw["state"]),
        "reason": None if raw["reason"] is None else EndReason(raw["reason"]),
        "serving": bool(raw["serving"]),
        "tags": msgspec.json.decode(raw["tags"], type=list[str]),
        "rates": Rates(raw["tokens_per_second"], raw["step_seconds"]),
        "signals": msgspec.Raw(raw["signals"].encode()),
        "recent": msgspec.Raw(raw["recent"].encode()),
    }
