"""The journal of a run: append-only JSON lines, one record per fact, fsynced before the fact takes effect.

The journal is the truth, the database its index. One writer (a file lock on the journal itself). A torn tail
is cut by the next writer and skipped by readers; `seq` removes doubles.

Kinds and their data (docs of the fields: the structs below):
    attempt     a life begins: AttemptFact                version     a version is current: VersionFact
    rewind      facts after step `to` no longer count     eval        a held-out evaluation: EvalFact
    step        an optimizer step is done: StepFact       checkpoint  a checkpoint is whole: CheckpointFact
    warning     something to look at: {message}           end         the attempt is over: EndFact
    placed      the nodes of the attempt: Placed          expect      an expectation is judged: Expected
"""

import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.bounds import RECORD_BYTES
from lorad.errors import Conflict, IntegrityError, StorageError
from lorad.files import is_name_of, log, open_file
from lorad.protocol.evals import SetScore
from lorad.protocol.inputs import Input, RowCounts
from lorad.protocol.nodes import PlacedNode

_VERSION = 1
_FEWER = "A step of fewer prompts has a shorter one."
_OF_ATTEMPTS = ("attempt", "placed", "end")  # they stay when a resume rewinds the facts


class Record(Struct, frozen=True):
    """One fact.

    at: Unix seconds.
    step: the number of optimizer steps done when it became true.
    crc: zlib.crc32 of the JSON of all other fields in this order.
    """

    v: int
    seq: int
    run: str
    attempt: int
    step: int
    kind: str
    at: float
    data: dict[str, Any]
    crc: int = 0


class Reference(Struct, frozen=True):
    """The adapter that the KL penalty of a run is measured against.

    name: the reference as the spec names it.
    sha256: the digest of its tensors.
    directory: the run's own copy.
    bases: the bases of the run that made it, see `DriverParams`.
    attested: the verdict of its attestation.
    """

    name: str
    sha256: str
    directory: str = ""
    bases: list[dict[str, Any]] = []
    attested: str = ""


class AttemptFact(Struct, frozen=True):
    """A record of kind `attempt`: what an attempt began with.

    resumed_from: the checkpoint's step; None for a fresh start.
    parameters: number of parameters of the adapter.
    data_sha256: digest of the rows.
    model_sha256, teacher_sha256, products: see `PoolInfo`.
    base_parameters: number of parameters of the base; 0 where it is not known.
    sizes: sizes of the trainer along its axes, where there is more than one rank.
    inputs: files that the attempt read, see `lorad/driver/begin.py`.
    commits: commits of the hub datasets that are streamed, by their names.
    software: versions of what the pool runs on, by package.
    routes: what rollout.routes came to.
    """

    pid: int
    steps: int  # the total asked for
    pool: str
    base_checksum: str
    resumed_from: int | None
    parameters: int
    data_sha256: str = ""
    model_sha256: str = ""
    base_parameters: int = 0
    trainer: str = ""
    engine: str = ""
    sizes: dict[str, int] = {}
    inputs: dict[str, Input] = {}
    reference: Reference | None = None
    teacher_sha256: str = ""
    commits: dict[str, str] = {}
    software: dict[str, str] = {}
    routes: Literal["record", "off"] = "off"
    rows: RowCounts = RowCounts()
    products: str = ""


class Placed(Struct, frozen=True):
    """A record of kind `placed`: the machines of a cluster that have the ranks of the attempt.

    nodes: sorted by name.
    ranks: how many, as many on each node.
    """

    nodes: tuple[PlacedNode, ...]
    ranks: int


class VersionFact(Struct, frozen=True):
    """A record of kind `version`.

    path: relative to the run directory.
    delivered_sha256: see `Attestation`.
    """

    version: int
    sha256: str
    parent: int | None
    path: str
    rank: int
    alpha: float
    bytes: int
    attested: str  # passed | inconclusive
    attestation: str  # the verdict's detail
    delivered_sha256: str = ""


class StepFact(Struct, frozen=True, omit_defaults=True):
    """A record of kind `step`.

    version: the version that made the samples.
    prompts: ids, in order.
    samples: a path relative to the run directory; "" where nothing was sampled.
    metrics: what was measured; a metric that was not measured is absent, one that was not finite is null in
        JSON.
    consumed: prompts after which the next step begins; None stands for the step's own. Dynamic sampling
        looks at more.
    """

    version: int
    prompts: list[str]
    position: int  # prompts consumed before this step
    samples: str
    samples_sha256: str
    metrics: Mapping[str, float | None]
    consumed: int | None = None


class EvalFact(Struct, frozen=True):
    """A record of kind `eval`.

    score: mean reward of greedy completions, without those whose reward failed; None when all failed, or
        where there is no reward for the data.
    nll: negative log-likelihood of the held-out completions, nats per token, of preferences of those that are
        wanted; None where there are none.
    accuracy: share of held-out pairs that are the right way round; None without pairs.
    token_accuracy: share of the tokens behind nll than which no other was more likely.
    sets: the further sets that were due, by name.
    samples: the file of the completions, relative to the run directory; "" where nothing was sampled.
    """

    version: int
    score: float | None
    problems: int
    failed: int
    nll: float | None = None
    accuracy: float | None = None
    token_accuracy: float | None = None
    sets: dict[str, SetScore] = {}
    samples: str = ""
    samples_sha256: str = ""


class CheckpointFact(Struct, frozen=True):
    """A record of kind `checkpoint`."""

    path: str
    version: int
    bytes: int


class EndFact(Struct, frozen=True):
    """A record of kind `end`: completed, stopped, failed, attestation_failed or lost."""

    reason: str
    detail: str
    hint: str = ""


def encode(record: Record) -> bytes:
    """Encode the line of a record, with its crc set."""
    crc = zlib.crc32(msgspec.json.encode(replace(record, crc=0)))
    return msgspec.json.encode(replace(record, crc=crc)) + b"\n"


def decode(line: bytes) -> Record | None:
    """Decode the record of a line; None when the line is torn, which lacks its end, or damaged."""
    try:
        record = msgspec.json.decode(line, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    plain = msgspec.json.encode(replace(record, crc=0))
    return record if line.endswith(b"\n") and zlib.crc32(plain) == record.crc else None


_FORM = log.lines(decode, "end", most=RECORD_BYTES, hint=_FEWER)
_FORM_OF_WRITERS = log.lines(decode, "refuse", most=RECORD_BYTES, hint=_FEWER)


def read(path: Path, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """Yield whole records from a byte offset on, each with its end, up to a torn or damaged line.

    Raises IntegrityError for one that is longer than any may be, and OSError.
    """
    if path.exists():
        with open_file(path) as file:
            yield from log.read(file, path, _FORM, offset)


class Place(Struct, frozen=True):
    """The last record that was read: its bytes, number and checksum; seq 0 before the first."""

    start: int = 0
    offset: int = 0
    seq: int = 0
    crc: int = 0


def read_on(path: Path, place: Place) -> Iterator[tuple[Record, int]] | None:
    """Read the records behind a place, as `read` does; None where the place's own record is gone.

    Its sync failed, so that it was cut, or it is another journal.
    """
    if not place.seq:
        return read(path, place.offset)
    records = read(path, place.start)
    last, _ = next(records, (None, 0))
    return records if last is not None and (last.seq, last.crc) == (place.seq, place.crc) else None


class JournalWriter(log.AppendLog[Record]):
    """Appends facts of one attempt. Raises Conflict when another process writes to this journal.

    A torn tail is cut. Where whole records follow the damage, nothing is cut, and IntegrityError is raised.
    """

    def __init__(self, path: Path, run: str, attempt: int) -> None:
        self.run = run
        self.attempt = attempt
        try:
            super().__init__(path, _FORM_OF_WRITERS, lock=True)
        except BlockingIOError:
            raise Conflict(f"another driver writes to {path}", hint=f"`lorad kill {run}` ends it.") from None
        self._seq = self.last.seq if self.last else 0

    def append(self, kind: str, step: int, data: Struct | dict[str, Any]) -> Record:
        """Write one fact and fsync it. Nothing counts where it raises OSError or IntegrityError (length)."""
        plain = data if isinstance(data, dict) else msgspec.to_builtins(data)
        record = Record(_VERSION, self._seq + 1, self.run, self.attempt, step, kind, time.time(), plain)
        line = encode(record)
        if len(line) > RECORD_BYTES:
            what = f"the record of {kind} at step {step}"
            raise IntegrityError(f"{what} is longer than {RECORD_BYTES} bytes", hint=_FEWER)
        self.write(line)
        self._seq += 1
        return record

    def check_place(self) -> None:
        """Raise StorageError when the journal no longer has its name: files beside it would be lost.

        Raises OSError when its name cannot be looked up.
        """
        if is_name_of(self.path, os.fstat(self._fd)):
            return
        raise StorageError(
            f"{self.path.parent} was moved or removed while the run worked",
            hint=f"Put it back, or start the daemon where the home is now; then `lorad resume {self.run}`.",
        )


def lineage(records: list[Record]) -> list[Record]:
    """Return the facts that count: a `rewind {to}` drops those of later steps; -1 drops all."""
    alive: list[Record] = []
    for record in records:
        if record.kind == "rewind":
            alive = [r for r in alive if r.step <= record.data["to"] or r.kind in _OF_ATTEMPTS]
        alive.append(record)
    return alive
