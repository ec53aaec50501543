"""The context that every verb of the daemon works on.

The store is an index, the disk is the truth; a new daemon does without the rest.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lorad.box.config import Config
from lorad.box.paths import Home
from lorad.daemon.event_tail import Tail
from lorad.daemon.gpu.state import GpuState
from lorad.daemon.journal import DaemonJournal
from lorad.daemon.loop import Loop
from lorad.daemon.open_store import record
from lorad.daemon.pool import Pools
from lorad.daemon.process.processes import Processes
from lorad.daemon.process.sharing import Users
from lorad.daemon.process.users import User
from lorad.daemon.read_threads import Readers
from lorad.daemon.state import (
    BillState,
    QueueState,
    RequestState,
    ServicesState,
    ServingState,
    StorageState,
)
from lorad.errors import StorageError
from lorad.protocol.journal import Reference
from lorad.protocol.preflight import SpecFacts
from lorad.spec.model import Spec
from lorad.spec.text import from_json
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


@dataclass
class Context:
    home: Home
    config: Config
    store: Store
    journal: DaemonJournal
    gpus: GpuState
    loop: Loop = field(default_factory=Loop)
    processes: Processes = field(default_factory=Processes)
    pools: Pools = field(default_factory=Pools)
    queue: QueueState = field(default_factory=QueueState)
    serving: ServingState = field(default_factory=ServingState)
    services: ServicesState = field(default_factory=ServicesState)
    storage: StorageState = field(default_factory=StorageState)
    requests: RequestState = field(default_factory=RequestState)
    bill: BillState = field(default_factory=BillState)
    users: Users = field(default_factory=Users)
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        record(self.store, self.journal)

    async def read(self, question: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a function of `lorad.store` that only reads, see `Readers.read`."""
        return await self.readers.read(question, *arguments, **options)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` as a task of its own; it is cancelled when the daemon closes."""
        task = asyncio.get_running_loop().create_task(work)
        self.loop.tasks.add(task)
        task.add_done_callback(self.loop.tasks.discard)

    def close(self) -> None:
        """Let the daemon end; the processes that it supervises continue."""
        self.loop.closing = True
        self.loop.poke()
        self.loop.ring()

    def user(self, uid: int) -> User | None:
        """Return the user who is to own the files and processes of `uid`; None for the daemon's own user."""
        return self.users.user(uid, self.config.environment)

    @cached_property
    def readers(self) -> Readers:
        """Return the connections that only read, each in a thread of its own."""
        return Readers(self.store)

    @cached_property
    def tail(self) -> Tail:
        """Return the newest events, for requests that follow them."""
        return Tail(self.store)

    @property
    def runs_root(self) -> Path:
        return (self.config.storage or self.home.root) / "runs"


_parsed = lru_cache(maxsize=1024)(from_json)


def spec_of(run: RunRow) -> Spec:
    return _parsed(run.spec.encode())


class Request(msgspec.Struct, frozen=True):
    """The contents of a run's `request.json`: how it was asked for.

    model_path: the directory that `model.path` was resolved to.
    bases: the weights that an imported adapter was made on, see `runs/bases.py`.
    reference: the version that KL is measured against, see `runs/reference.py`; None where that is the base.
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
    """Read `request.json` where it has changed since it was last read. Raises StorageError."""
    path = f"{run.directory}/request.json"
    try:
        stat = os.stat(path)
        return _read(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = (
            f"Put a backup of the file in its place. `lorad export {run.name}@N DIRECTORY` still copies a "
            f"version, and `lorad run {run.directory}/spec.yaml --name NEW` starts the run from scratch."
        )
        raise unreadable(Path(path), error, hint) from error


def unreadable(path: Path, error: Exception, hint: str) -> StorageError:
    """Make the error for a file that cannot be read or decoded."""
    why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is damaged"
    return StorageError(f"{path} {why}", hint=hint)


@lru_cache(maxsize=1024)
def _read(path: str, *_stamps: int) -> Request:
    return msgspec.json.decode(Path(path).read_bytes(), type=Request)
