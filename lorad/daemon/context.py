"""What every verb of the daemon works on. The store is the index, the disk is the truth; the rest may be forgotten."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lorad.bounds import Bounds
from lorad.box.config import Config
from lorad.box.machine import Machine, read_machine
from lorad.box.paths import AttemptDir, Home, RunDir
from lorad.daemon.counters import Meter
from lorad.daemon.event_tail import Tail
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.lock_notes import Notes
from lorad.daemon.gpu.occupancy import Sights
from lorad.daemon.journal import DaemonJournal
from lorad.daemon.open_store import record
from lorad.daemon.pool import Pool
from lorad.daemon.process.commands import Commands
from lorad.daemon.process.processes import Processes
from lorad.daemon.process.pulse import Pulse
from lorad.daemon.process.user_threads import Hands, Turns
from lorad.daemon.process.users import User, user_of
from lorad.daemon.read_threads import Readers
from lorad.daemon.state import Disks
from lorad.daemon.troubles import Troubles
from lorad.daemon.usage import Disk
from lorad.daemon.wake import Waker
from lorad.errors import StorageError
from lorad.protocol.connection import Connection
from lorad.protocol.journal import Reference
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.preflight import SpecFacts
from lorad.spec.model import Spec
from lorad.spec.text import from_json
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.db import Store
from lorad.store.rows import RunRow

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Seconds that the daemon waits before it uses force, or tries again."""

    pool_gone: float = 10.0  # a driver whose pool is gone ends by itself
    pool_shutdown: float = 5.0  # after `shutdown`: SIGTERM
    pool_term: float = 60.0  # after `shutdown`: SIGKILL; a server lets go of its device first
    signal_again: float = 5.0
    restart: float = 1.0  # before the first automatic restart; doubles
    restart_most: float = 300.0
    preflight: float = 120.0
    pool_ready: float = 1200.0  # a server that loads a large model takes minutes


def _recent(read: Callable[[], Machine], seconds: float = 1.0) -> Callable[[], Machine]:
    """The machine as it was read a moment ago: every run of a long queue asks for it."""
    seen: list[tuple[float, Machine]] = []

    def recent() -> Machine:
        if not seen or time.monotonic() - seen[0][0] > seconds:
            seen[:] = [(time.monotonic(), read())]
        return seen[0][1]

    return recent


@dataclass
class Context:
    home: Home
    config: Config
    store: Store
    journal: DaemonJournal
    devices: list[Device]
    commands: Commands = field(default_factory=Commands)
    patience: Patience = field(default_factory=Patience)
    bounds: Bounds = field(default_factory=Bounds)
    processes: Processes = field(default_factory=Processes)
    waker: Waker = field(default_factory=Waker)
    machine: Callable[[], Machine] = field(default_factory=lambda: _recent(read_machine))
    pools: dict[str, Pool] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    system: bool = False  # several users share this daemon
    closing: bool = False
    parting: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by a request to end, until it is answered
    disk: Disk = field(default_factory=Disk)
    meter: Meter = field(default_factory=Meter)
    hands: Hands = field(default_factory=Hands)
    polls: Hands = field(default_factory=Hands)  # short questions to pools, which do not wait behind long ones
    checks: Turns = field(default_factory=lambda: Turns("checks of specs", at_once=4, most=32))
    # Notes that a new daemon does without:
    signalled: dict[Path, tuple[int, float]] = field(default_factory=dict)  # attempt -> signal, when
    not_before: dict[str, float] = field(default_factory=dict)  # run -> monotonic time of its restart
    pool_gone_since: dict[str, float] = field(default_factory=dict)
    last_words: dict[str, int] = field(default_factory=dict)  # run -> bytes of its journal when its driver was gone
    cuts: Counter[tuple[str, int]] = field(default_factory=Counter)  # run, attempt -> times its journal lost records
    unpruned: set[str] = field(default_factory=set)  # runs, see `prune_again`
    pulses: dict[AttemptDir, Pulse] = field(default_factory=dict)  # see `health.py`
    put_down: set[AttemptDir] = field(default_factory=set)  # those that hang and are being killed
    looked_at: float = 0.0  # monotonic time of the last look at all pulses
    rotated_at: float = 0.0  # ... and at the sizes of logs
    notes: Notes = field(default_factory=Notes)  # beside the locks of GPUs
    sights: Sights = field(default_factory=Sights)  # who computes on GPUs
    disks: Disks = field(default_factory=Disks)
    active: tuple[int | None, list[RunRow]] = field(default=(None, []))  # of `queue/tenants.py`, by `Store.changes`
    wishes: dict[tuple[Device, ...], dict[str, PoolSetup]] | None = None  # in one pass of `queue/place.py`
    asked: dict[str, tuple[Any, dict[Any, Any]]] = field(default_factory=dict)  # by run, in `queue/place.py`
    troubles: Troubles = field(default_factory=Troubles)
    lost_pools: list[Path] = field(default_factory=list)  # directories of pools that cannot be known
    rung: int = 0  # the newest event that its readers were woken for
    log_trouble: str = ""  # why the daemon's log cannot be written
    pauses: dict[str, tuple[float, float]] = field(default_factory=dict)  # run that serves -> seconds, and their end

    in_hand: Counter[str] = field(default_factory=Counter)  # run@version: somebody is about to use it, so it stays
    moving: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))  # by alias
    served: int = 1  # counts changes of pins, aliases and pools: `serving/` looks when it grew
    table: int = 0  # what `served` was when the gateway's table was written
    tables: dict[int, bytes] = field(default_factory=dict)  # uid -> what the gateway of that owner was told last
    gateways_asked: dict[int, float] = field(default_factory=dict)  # uid -> monotonic time; see `serving/gateways.py`

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: set[Connection] = field(default_factory=set)  # threads wait for answers on them

    def __post_init__(self) -> None:
        record(self.store, self.journal)
        self.readers = Readers(self.store)

    async def read(self, question: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """What a function of `lorad.store` that asks finds, without holding up the loop: see `Readers.read`."""
        return await self.readers.read(question, *arguments, **options)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work` go on by itself; it is cancelled when the daemon closes."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def close(self) -> None:
        """Let the daemon end; what it supervises goes on."""
        self.closing = True
        self.waker.poke()
        self.waker.ring()

    def user(self, uid: int) -> User | None:
        """Whose what belongs to `uid` is to be; None: this process's own, as all of a daemon of one user."""
        return user_of(uid, self.config.environment) if self.system else None

    @cached_property
    def tail(self) -> Tail:
        """The newest events, for who follows them."""
        return Tail(self.store)

    @property
    def runs_root(self) -> Path:
        return (self.config.storage or self.home.root) / "runs"

    def move(
        self, name: str, move: Move, *, reason: EndReason | None = None, detail: str = "", by: str = "daemon"
    ) -> RunRow:
        """One move of a run, in the store and in the daemon's journal: both or neither."""
        with self.store.write():
            row = runs.move(self.store, name, move, reason=reason, detail=detail, by=by)
            self.journal.append("move", name, by, move=move, state=row.state, reason=reason, detail=detail)
        return row


def run_dir(run: RunRow) -> RunDir:
    return RunDir(Path(run.directory))


def attempt_dir(run: RunRow) -> AttemptDir:
    """Of the run's present attempt."""
    return run_dir(run).attempt(run.attempt)


def spec_of(run: RunRow) -> Spec:
    return _parsed(run.spec)


@lru_cache(maxsize=1024)
def _parsed(spec: str) -> Spec:
    return from_json(spec.encode())


class Request(msgspec.Struct, frozen=True):
    """`request.json` of a run: how it was asked for. `model_path`: the directory that `model.path` was resolved to.

    bases: what is known of the weights that its adapter came from elsewhere with, see `runs/bases.py`. reference: see
    `runs/reference.py`; None: KL is to the base.
    """

    cwd: str
    source: str
    overrides: list[str]
    model_path: str
    model_dtype: str
    parameters: int
    facts: SpecFacts = SpecFacts()
    bases: list[dict[str, Any]] = []
    reference: Reference | None = None


def request_of(run: RunRow) -> Request:
    """Raises StorageError. Who waits in the queue is looked at again and again: read when it changed."""
    path = f"{run.directory}/request.json"
    try:
        stat = os.stat(path)
        return _read(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = (
            f"Put a backup of the file in its place. `lorad export {run.name}@N DIRECTORY` still copies a version, "
            f"and `lorad run {run.directory}/spec.yaml --name NEW` starts the run from scratch."
        )
        raise unreadable(Path(path), error, hint) from error


def unreadable(path: Path, error: Exception, hint: str) -> StorageError:
    """A file that cannot be read, or holds something else than it should."""
    why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is damaged"
    return StorageError(f"{path} {why}", hint=hint)


@lru_cache(maxsize=1024)
def _read(path: str, *_as_it_is: int) -> Request:
    return msgspec.json.decode(Path(path).read_bytes(), type=Request)
