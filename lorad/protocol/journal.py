"""The journal of a run: append-only JSON lines, one record per fact, fsynced before the fact takes effect.

The journal is the truth, the database its index. One writer (a file lock on the journal itself). A torn tail
is cut by the next writer and skipped by readers; `seq` removes doubles.

Kinds and their data (docs of the fields: the structs below):
    attempt     a life begins: Attempt                    version     a version is current: VersionFact
    rewind      facts after step `to` no longer count     eval        a held-out evaluation: EvalFact
    step        an optimizer step is done: StepFact       checkpoint  a checkpoint is whole: CheckpointFact
    warning     something to look at: {message}           end         the attempt is over: EndFact
    placed      the nodes of the attempt: Placed      expect      an expectation is judged: Expected
"""

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from lorad.bounds import RECORD_BYTES
from lorad.errors import Conflict, IntegrityError, StorageError
from lorad.files import append, fsync, names, open_file
from lorad.protocol.evals import SetScore
from lorad.protocol.inputs import Input, RowCounts
from lorad.protocol.nodes import PlacedNode

_VERSION = 1
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


class Attempt(Struct, frozen=True):
    """A record of kind `attempt`: what an attempt began with.

    resumed_from: the checkpoint's step; None for a fresh start.
    parameters: number of parameters of the adapter.
    data_sha256: digest of the rows.
    model_sha256: see `PoolInfo`.
    base_parameters: number of parameters of the base; 0 where it is not known.
    trainer, engine: the backends.
    sizes: sizes of the trainer along its axes, where there is more than one rank.
    inputs: files that the attempt read, see `lorad/driver/begin.py`.
    teacher_sha256: see `PoolInfo`.
    commits: of hub datasets that are streamed, by their names.
    software: versions of what the pool runs on, by package.
    routes: what rollout.routes came to.
    rows: what the data are made of.
    products: see `PoolInfo`.
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

    nodes: sorted by name. ranks: how many, as many on each node.
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
    consumed: prompts after which the next step begins; None: those of the step. Dynamic sampling looks at
        more.
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
    """A record of kind `end`.

    reason: completed | stopped | failed | attestation_failed | lost.
    """

    reason: str
    detail: str
    hint: str = ""


def encode(record: Record) -> bytes:
    """Encode the line of a record, with its crc set."""
    crc = zlib.crc32(msgspec.json.encode(msgspec.structs.replace(record, crc=0)))
    return msgspec.json.encode(msgspec.structs.replace(record, crc=crc)) + b"\n"


def decode(line: bytes) -> Record | None:
    """Decode the record of a line; None when the line is torn or damaged."""
    try:
        record = msgspec.json.decode(line, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    plain = msgspec.structs.replace(record, crc=0)
    return record if zlib.crc32(msgspec.json.encode(plain)) == record.crc else None


def read(path: Path, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """Whole records from a byte offset, each with the offset after it; stops at the first torn or damaged
    line.

    Raises IntegrityError for one that is longer than any may be, and OSError.
    """
    if not path.exists():
        return
    number = "the first" if offset == 0 else "one"
    with open_file(path) as file:
        file.seek(offset)
        while line := file.readline(RECORD_BYTES + 1):
            if len(line) > RECORD_BYTES:
                raise _too_long(f"{path}: {number} record, at byte {offset},")
            record = decode(line) if line.endswith(b"\n") else None
            if record is None:
                return
            offset += len(line)
            number = f"the {record.seq + 1}."
            yield record, offset


def _too_long(what: str) -> IntegrityError:
    return IntegrityError(
        f"{what} is longer than {RECORD_BYTES} bytes", hint="A step of fewer prompts has a shorter one."
    )


class JournalWriter:
    """Appends facts of one attempt. Raises Conflict when another process writes to this journal.

    A torn tail is cut. Raises IntegrityError when whole records follow the damage: then nothing is cut.
    """

    def __init__(self, path: Path, run: str, attempt: int) -> None:
        self.run, self.attempt, self._path = run, attempt, path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise Conflict(f"another driver writes to {path}", hint=f"`lorad kill {run}` ends it.") from None
        try:
            self._seq = self._cut_torn_tail(path)
        except BaseException:
            os.close(self._fd)
            raise

    def _cut_torn_tail(self, path: Path) -> int:
        """The number of the last record; the file ends with it."""
        seq = end = 0
        for record, offset in read(path):
            seq, end = record.seq, offset
        tail = os.pread(self._fd, os.fstat(self._fd).st_size - end, end)
        if whole := sum(decode(line) is not None for line in tail.split(b"\n")[1:]):
            raise IntegrityError(
                f"{path} is damaged at byte {end}, and {whole} whole records follow",
                hint=f"Restore it from a copy, or give up what follows: `truncate -s {end} {path}`.",
            )
        os.ftruncate(self._fd, end)
        with contextlib.suppress(PermissionError):  # a shared daemon's, which made the file and did this
            fsync(path.parent)  # the file may be new
        return seq

    def append(self, kind: str, step: int, data: Struct | dict[str, Any]) -> Record:
        """Write one fact and fsync it.

        Raises OSError (disk full), IntegrityError (too long): nothing of it counts.
        """
        plain = data if isinstance(data, dict) else msgspec.to_builtins(data)
        record = Record(_VERSION, self._seq + 1, self.run, self.attempt, step, kind, time.time(), plain)
        line = encode(record)
        if len(line) > RECORD_BYTES:
            raise _too_long(f"the record of {kind} at step {step}")
        append(self._fd, line)
        self._seq += 1
        return record

    def check_place(self) -> None:
        """Raises StorageError when the file no longer has its name, since what is written beside it would be
        lost.

        Raises OSError when its name cannot be looked up.
        """
        if names(self._path, os.fstat(self._fd)):
            return
        raise StorageError(
            f"{self._path.parent} was moved or removed while the run worked",
            hint=f"Put it back, or start the daemon where the home is now; then `lorad resume {self.run}`.",
        )

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def lineage(records: list[Record]) -> list[Record]:
    """The facts that count: a `rewind {to}` drops what earlier attempts said of later steps (to = -1: all of
    it).
    """
    alive: list[Record] = []
    for record in records:
        if record.kind == "rewind":
            alive = [r for r in alive if r.step <= record.data["to"] or r.kind in _OF_ATTEMPTS]
        alive.append(record)
    return alive
