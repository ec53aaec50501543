"""The state that rooms of the daemon keep between two passes of the loop. A new daemon does without it."""

import asyncio
import contextlib
import os
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from lorad.bounds import Bounds
from lorad.daemon.counters import Meter
from lorad.loggers.table import FollowedRun
from lorad.notify.outbox import Outbox
from lorad.protocol.connection import Connection
from lorad.records.runs import Queued
from lorad.store.bill import Hours
from lorad.store.rows import RunRow, VersionRow


@dataclass(frozen=True, eq=False)
class PoolRequest:
    """A request that waits for a pool of a run's base.

    until: the monotonic time until which it waits for others to leave.
    pool: the id of the pool, once the loop has found one.
    """

    run: RunRow
    until: float
    pool: asyncio.Future[str]


@dataclass
class QueueState:
    """What `queue/` remembers.

    requests: the requests that wait for pools, in the order in which they came.
    being_made: names, in lower case, of runs whose files a request is writing.
    not_before: the monotonic time before which a run does not restart.
    places: where each queued run stands, as the last pass found it.
    foreseen: the monotonic time of the last look ahead, and when queued runs start and after which run.
    looked_for: the runs that were queued then.
    hours: what users have used by the hour, and of which state of the bill, see `queue/shares.py`.
    passed: queued runs that others pass on the cluster for now, see `queue/cluster.py`.
    asked_since: the monotonic time at which each pool began to wait for nodes.
    lacking: pools that did not get nodes at once.
    on_cluster: queued runs that may go to the cluster, as the last pass found them.
    strangers: uid of a user -> uid of the other user whose agents the cluster started for them.
    clock: returns the Unix time.
    """

    requests: list[PoolRequest] = field(default_factory=list)
    being_made: set[str] = field(default_factory=set)
    not_before: dict[str, float] = field(default_factory=dict)
    places: dict[str, Queued] = field(default_factory=dict)
    foreseen: tuple[float, dict[str, tuple[float, str]]] = (float("-inf"), {})
    looked_for: set[str] = field(default_factory=set)
    hours: tuple[tuple[int, ...], dict[int, Hours]] = ((), {})
    passed: frozenset[str] = frozenset()
    asked_since: dict[str, float] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    on_cluster: frozenset[str] = frozenset()
    strangers: dict[int, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.time


@dataclass
class ServingState:
    """What `serving/` remembers.

    in_hand: how many requests use a `run@version`, which is not deleted meanwhile.
    moving: a lock for each alias.
    served: counts the changes of pins, aliases and pools; rooms look again when it grew.
    table: the count of `served` when the gateway's table was written.
    pauses: for a run that serves, the seconds between two tries to start its pool, and when the next is due.
    """

    in_hand: Counter[str] = field(default_factory=Counter)
    moving: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    served: int = 1
    table: int = 0
    pauses: dict[str, tuple[float, float]] = field(default_factory=dict)


class RunClock(NamedTuple):
    """How far the clock on the wall was ahead of the monotonic one at a run's newest step; seconds."""

    attempt: int
    step: int
    ahead: float


@dataclass
class ServicesState:
    """What `services/` remembers.

    needed_at: when somebody last needed the process of a service for a uid, in monotonic time.
    tables: what such a process was last given to do.
    followed: the runs whose journals loggers follow, by name, each with the uid of its owner; None before the
        first look.
    outbox: the notifications as they are on disk, but for the cursor; None before the first look.
    clocks: the clock of each run whose alarms somebody is to hear of, by name.
    """

    needed_at: dict[tuple[str, int], float] = field(default_factory=dict)
    tables: dict[tuple[str, int], Struct] = field(default_factory=dict)
    followed: dict[str, tuple[int, FollowedRun]] | None = None
    outbox: Outbox | None = None
    clocks: dict[str, RunClock] = field(default_factory=dict)


@dataclass
class RequestState:
    """What `api/` remembers.

    parting: held by a request to end the daemon until it is answered.
    waiting: connections to pools on which threads wait for answers.
    trials: names under which specs are tried, see `api/verbs/trial.py`.
    """

    bounds: Bounds = field(default_factory=Bounds)
    meter: Meter = field(default_factory=Meter)
    parting: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: set[Connection] = field(default_factory=set)
    trials: set[str] = field(default_factory=set)


@dataclass
class UsesFile:
    """How far the file of uses of a pool's life was read, and which file it was."""

    offset: int = 0
    inode: int = 0
    life: str = ""


@dataclass
class BillState:
    """What `bill/` remembers.

    files: how far the file of uses of a pool's life was read, by the life's directory.
    closed: the directories of lives whose use is all taken in, which are not in `files`.
    read_at: the monotonic time at which the files of pools that are up were last read.
    taken: how many reports were taken in.
    sizes: bytes of directories of runs, and the monotonic time at which they were measured.
    """

    files: dict[Path, UsesFile] = field(default_factory=dict)
    closed: set[Path] = field(default_factory=set)
    read_at: float = float("-inf")
    taken: int = 0
    sizes: dict[str, tuple[float, int]] = field(default_factory=dict)


@dataclass
class _Disk:
    """What is known of the disk.

    used: bytes of the home and its storage; None before the first look.
    warning: says that they are too many; empty when they are not.
    """

    used: int | None = None
    measured_at: float = float("-inf")
    is_measuring: bool = False
    warning: str = ""


@dataclass
class _UsedByOwner:
    """Bytes of all runs by the uid of their owner, measured in a thread.

    at: the monotonic time of the measurement.
    """

    used: dict[int, int] = field(default_factory=dict)
    at: float = float("-inf")
    is_measuring: bool = False


@dataclass
class StorageState:
    """What is known of the files of runs.

    unpruned: runs whose old files are to be deleted.
    doubted: runs whose journal may be another run's.
    unkept: versions that go once no engine and no request has them any more, by run.
    last_words: bytes of a run's journal when its driver was found gone.
    cuts: how often the journal of an attempt, by run and number, lost records.
    rotated_at: the monotonic time of the last look at the sizes of logs.
    log_trouble: why the daemon's own log cannot be written.
    """

    disk: _Disk = field(default_factory=_Disk)
    by_owner: _UsedByOwner = field(default_factory=_UsedByOwner)
    unpruned: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    unkept: dict[str, list[VersionRow]] = field(default_factory=dict)
    last_words: dict[str, int] = field(default_factory=dict)
    cuts: Counter[tuple[str, int]] = field(default_factory=Counter)
    rotated_at: float = 0.0
    log_trouble: str = ""


def bytes_of(paths: Iterable[Path], *, on_disk: bool = False) -> int:
    """Add up the bytes of files and of all that directories hold. What has several names counts once.

    on_disk: count the blocks that files take instead of their lengths.

    What goes away meanwhile does not count. Runs in a thread.
    """
    total = 0
    seen = set[tuple[int, int]]()
    for status in _files_below(paths):
        key = status.st_dev, status.st_ino
        if key not in seen:
            total += 512 * status.st_blocks if on_disk else status.st_size
            if status.st_nlink > 1:
                seen.add(key)
    return total


def _files_below(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the status of the files at and below some paths, where each directory is read once."""
    read = set[tuple[int, int]]()
    left = [os.fspath(path) for path in paths]
    while left:
        path = left.pop()
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            key = status.st_dev, status.st_ino
            if not stat.S_ISDIR(status.st_mode):
                yield status
            elif key not in read:
                read.add(key)
                with os.scandir(path) as entries:
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            if entry.is_dir(follow_symlinks=False):
                                left.append(entry.path)
                            else:
                                yield entry.stat(follow_symlinks=False)
