"""The rows of the database as the store returns them.

Most are a shape of `lorad.records` with what only the database has of it; the others are never sent.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from lorad.box.paths import AttemptDir, RunDir
from lorad.protocol.evals import SetScore
from lorad.records.measured import Evaluation, Number
from lorad.records.runs import Event, Rates, Run, RunGroup, Signals
from lorad.records.versions import Version
from lorad.states import EndReason, RunState
from lorad.store.record import Row


class RunSummary(Run, frozen=True, kw_only=True, eq=False):
    """What a list shows of a run. Its spec is larger than all of this, and stays on disk.

    Rows that did not change since they were read before are the same objects (`run_summary`).

    serving: whether a pool of its base stays up for it.
    yielded: why it gives, or gave, its device back, where no other run needs it.
    """

    state: RunState
    reason: EndReason | None = None
    wanted: Literal["pause", "stop", "kill"] | None = None
    owner_uid: int
    serving: bool = False
    yielded: str | None = None


class RunRow(RunSummary, frozen=True, kw_only=True, eq=True):
    """A run.

    spec: its spec as JSON text.
    resume_step: the step of the checkpoint that its next attempt begins with.
    restart_at: Unix time from which it may be placed again after an automatic restart.
    """

    spec: str
    directory: str
    resume_step: int | None = None
    restart_at: float | None = None

    @property
    def dir(self) -> RunDir:
        """Its directory, which knows the names of what is in it."""
        return RunDir(Path(self.directory))

    @property
    def attempt_dir(self) -> AttemptDir:
        """The directory of its present attempt."""
        return self.dir.attempt(self.attempt)


_Kind = TypeVar("_Kind", bound=RunSummary)


class QueuedRow(Struct, frozen=True):
    """What the order of the queue depends on, and why a run waits."""

    name: str
    owner_uid: int
    priority: int
    waiting: str
    owner: str = ""


class GroupRow(RunGroup, frozen=True, kw_only=True):
    """A group of runs, which belongs to a user."""

    owner_uid: int


class ReservationRow(Struct, frozen=True, kw_only=True):
    """A device that a user keeps from lorad.

    device: the UUID of a GPU, or the name of a slot of the CPU.
    seconds: how long it lasts from its beginning; None: until `until`, or until it is released.
    until: Unix time; None until it has begun, or until it is released.
    began_at: since when nothing of lorad is on the device; None before.
    urgent: whether runs on it are asked to stop at their next step.
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


class VersionRow(Version, frozen=True, kw_only=True):
    """A version of an adapter: immutable but for what is said about it.

    lineage: False when a rewind passed it.
    path: an absolute path, whether there are files or not.
    """

    attempt: int = 0
    lineage: bool = True
    owner_uid: int
    path: str

    @property
    def name(self) -> str:
        return f"{self.run}@{self.version}"


class CheckpointPlace(Struct, frozen=True, kw_only=True):
    """Where the files of a checkpoint should be.

    path: an absolute path.
    """

    run: str
    step: int
    attempt: int
    path: str


class EvalRow(Evaluation, frozen=True, kw_only=True):
    """An evaluation, and the file of its samples below the run's directory."""

    samples: str = ""
    samples_sha256: str = ""


def eval_row(raw: Row) -> EvalRow:
    return EvalRow(**raw | {"sets": msgspec.json.decode(raw["sets"], type=dict[str, SetScore])})


class PoolRow(Struct, frozen=True, kw_only=True):
    """A pool whose process is up.

    key: what a run must ask for to join.
    idle_since: Unix time; None while a run uses it.
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


def event_row(raw: Row) -> Event:
    return Event(**raw | {"data": msgspec.json.decode(raw["data"])})


_MADE_OF = {"group": ("queue_group",), "rates": ("tokens_per_second", "step_seconds")}  # columns of a field
_ANSWERED = {"queue", "doing", "values"}  # fields of a run that no column has
_PLAIN = set(RunRow.__struct_fields__) - _ANSWERED - {*_MADE_OF, "signals", "recent", "tags", "state"}
_PLAIN -= {"reason", "serving"}
SUMMARY_COLUMNS = tuple(
    column
    for field in RunSummary.__struct_fields__
    if field not in _ANSWERED
    for column in _MADE_OF.get(field, (field,))
)
_SIGNALS = msgspec.json.Decoder(Signals)
_RECENT = msgspec.json.Decoder(list[Number | None])


@lru_cache(maxsize=2048)
def run_summary(values: tuple[Any, ...]) -> RunSummary:
    """Decode the values of SUMMARY_COLUMNS, or return what the same values were decoded to before."""
    return decode_run(RunSummary, dict(zip(SUMMARY_COLUMNS, values, strict=True)))


def decode_run(kind: type[_Kind], raw: Row) -> _Kind:
    """Decode the columns of a run."""
    return kind(
        **{field: raw[field] for field in kind.__struct_fields__ if field in _PLAIN},
        state=RunState(raw["state"]),
        reason=None if raw["reason"] is None else EndReason(raw["reason"]),
        serving=bool(raw["serving"]),
        tags=msgspec.json.decode(raw["tags"], type=list[str]),
        group=raw["queue_group"] or "",
        rates=Rates(raw["tokens_per_second"], raw["step_seconds"]),
        signals=_SIGNALS.decode(raw["signals"]),
        recent=_RECENT.decode(raw["recent"]),
    )
