"""What the rooms of the daemon remember between two passes of the loop.

A new daemon does without all of it.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
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

LOOK_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class PoolRequest:
    """A request that waits for a pool of a run's base.

    until: the monotonic time until which it waits for others to leave.
    pool: the id of the pool, which the loop answers.
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
    foreseen: when queued runs start and after which run, and the monotonic time of that look ahead.
    looked_for: the runs that were queued then.
    hours: what users have used by the hour, and which state of the bill that is (see `queue/shares.py`).
    passed: queued runs that others pass on the cluster for now, see `queue/cluster.py`.
    asked_since: when each pool began to wait for nodes, in monotonic time.
    lacking: pools that did not get theirs at once.
    on_cluster: queued runs that may go to the cluster, as the last pass found them.
    strangers: users for whom the cluster started agents of another user, and which user that is (uids).
    clock: tells the Unix time.
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

    in_hand: how many requests are about to use a `run@version`, which is not deleted meanwhile.
    moving: a lock for each alias.
    served: counts the changes of pins, aliases and pools; rooms look again when it grew.
    table: what `served` was when the gateway's table was written.
    pauses: for a run that serves, the seconds between two tries to start its pool, and when the next one is
        due.
    """

    in_hand: Counter[str] = field(default_factory=Counter)
    moving: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    served: int = 1
    table: int = 0
    pauses: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass
class ServicesState:
    """What `services/` remembers of the processes of services, by the service's name and the uid.

    needed_at: when somebody last needed a process, in monotonic time.
    tables: what a process was last given to do.
    """

    needed_at: dict[tuple[str, int], float] = field(default_factory=dict)
    tables: dict[tuple[str, int], Struct] = field(default_factory=dict)


@dataclass
class LoggerState:
    """What `services/loggers.py` remembers.

    runs: the runs whose journals are followed, by name, each with the uid of its owner; None before the first
        look.
    """

    runs: dict[str, tuple[int, FollowedRun]] | None = None


class RunClock(NamedTuple):
    """How far the clock on the wall was ahead of the monotonic one at a run's newest step; seconds."""

    attempt: int
    step: int
    ahead: float


@dataclass
class NotifyState:
    """What `services/notify.py` remembers.

    outbox: as it is on disk, but for its cursor; None before the first look.
    clocks: the clock of each run whose alarms somebody is to hear of, by name.
    """

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

    files: the file of uses of each life of a pool whose use is not all taken in, by the life's directory.
    closed: the directories of lives whose use is.
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
    warning: the warning that they are too many; empty when they are not.
    """

    used: int | None = None
    measured_at: float = field(default_factory=lambda: -LOOK_SECONDS)
    is_measuring: bool = False
    warning: str = ""


@dataclass
class _Disks:
    """Bytes of all runs by the uid of their owner, measured in a thread.

    at: the monotonic time of the measurement.
    """

    used: dict[int, int] = field(default_factory=dict)
    at: float = float("-inf")
    is_measured: bool = False


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
    by_owner: _Disks = field(default_factory=_Disks)
    unpruned: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    unkept: dict[str, list[VersionRow]] = field(default_factory=dict)
    last_words: dict[str, int] = field(default_factory=dict)
    cuts: Counter[tuple[str, int]] = field(default_factory=Counter)
    rotated_at: float = 0.0
    log_trouble: str = ""


def bytes_of(directories: Iterable[Path]) -> int:
    """Sum the bytes that directories take on disk; a file with several names counts once.

    What goes away meanwhile does not count. Runs in a thread.
    """
    total = 0
    seen = set()
    left = [os.fspath(path) for path in directories]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif status.st_nlink == 1 or (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        total += status.st_blocks * 512
    return total
