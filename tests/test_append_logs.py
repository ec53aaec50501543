"""Every append-only log and its followers are broken in the same ways; the tables say where they differ.

The one log that all have is broken by itself, with each policy. Then it is written as it is in lorad: the
journal of a run, the daemon's own, the log between the door and a lane, and a pool's file of uses. Who
follows while it is written is asked after each break as well: the database of runs, and a logger.
"""

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from lorad.daemon import journal as of_daemon
from lorad.daemon.bill import take_in
from lorad.daemon.state import UsesFile
from lorad.errors import IntegrityError, LoradError
from lorad.files import open_file
from lorad.files.log import AppendLog, lines, read
from lorad.loggers.cursor import CursorFile
from lorad.loggers.follow import Follower
from lorad.loggers.logger import LoggedRun, Logger, Point, Segment
from lorad.pool.usage_file import UsageFile
from lorad.protocol import journal as of_run
from lorad.protocol.status import Use, Uses
from lorad.store.db import Store
from lorad.store.ingest import ingest
from lorad.store.record import Change
from lorad.tinker import log as of_door
from lorad.tinker.records import Request, Step
from tests.house_figures import ROOT, own_code
from tests.kit.journals import new_run, step

DAMAGED = "refused as damaged"


class Log:
    """A log of numbers, for which `file` has the bytes. A follower keeps its place between two readings."""

    name: ClassVar[str]
    mends: ClassVar[bool] = False  # what was not synced stays

    def __init__(self, root: Path) -> None:
        self.file = root / "log"
        self.open()

    def open(self) -> None:
        """Begin to write. Raises IntegrityError."""

    def append(self, number: int) -> None:
        """Write a number. Raises OSError or LoradError where it does not count."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop writing."""

    def read(self) -> list[int]:
        """Read the numbers. Raises IntegrityError."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave nothing open."""
        if hasattr(self, "writer"):
            self.close()


def decode(line: bytes) -> int | None:
    """Decode the number of a line."""
    match = re.fullmatch(rb"number (\d+), checksum (\d+)\n", line)
    return int(match[1]) if match and zlib.crc32(match[1]) == int(match[2]) else None


class Ending(Log):
    """The one log by itself: readers end at damage, and a writer refuses it where more follows."""

    name = "ending"
    damage: ClassVar[Literal["end", "pass", "refuse"]] = "end"

    def open(self) -> None:
        form = None if self.damage == "pass" else lines(decode, "refuse")
        self.writer = AppendLog(self.file, form, mends=self.mends)

    def append(self, number: int) -> None:
        self.writer.write(b"number %d, checksum %d\n" % (number, zlib.crc32(b"%d" % number)))

    def close(self) -> None:
        self.writer.close()
        del self.writer

    def read(self) -> list[int]:
        with open_file(self.file) as file:
            return [number for number, _ in read(file, self.file, lines(decode, self.damage))]


class Refusing(Ending):
    """The one log by itself: damage is refused, and what was not synced is mended."""

    name = "refusing"
    mends = True
    damage = "refuse"


class Passing(Ending):
    """The one log by itself: damage is passed over, and a torn line stays."""

    name = "passing"
    damage = "pass"


class OfRun(Log):
    name = "run"

    def open(self) -> None:
        self.writer = of_run.JournalWriter(self.file, "sorter", 1)

    def append(self, number: int) -> None:
        step(self.writer, number)

    def close(self) -> None:
        self.writer.close()
        del self.writer

    def read(self) -> list[int]:
        return [record.step for record, _ in of_run.read(self.file)]


class InDatabase(OfRun):
    name = "database"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.store = Store(root / "lorad.db")
        new_run(self.store)

    def read(self) -> list[int]:
        ingest(self.store, "sorter", self.file)
        return [row["step"] for row in self.store.rows("SELECT step FROM steps ORDER BY step")]

    def end(self) -> None:
        super().end()
        self.store.close()


class Noted(Logger):
    """A logger that keeps the steps of each segment."""

    steps: dict[int, Point]

    def begin(self, segment: Segment, after: int) -> None:
        self.steps = {number: point for number, point in self.steps.items() if number <= after}

    def put(self, point: Point) -> None:
        self.steps[point.step] = point

    def flush(self) -> None:
        """There is nothing to flush."""

    def close(self, reason: str = "") -> None:
        """There is nothing to close."""


class InLogger(OfRun):
    name = "logger"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.logger = Noted(LoggedRun("sorter", 1.0, root), None)
        self.logger.steps = {}
        self.follower = Follower(self.file, lambda: self.logger, CursorFile(root / "loggers" / "noted.json"))

    def read(self) -> list[int]:
        self.follower.catch_up()
        return list(self.logger.steps)

    def end(self) -> None:
        super().end()
        self.follower.drop()


class OfDaemon(Log):
    name = "daemon"

    def open(self) -> None:
        self.writer = of_daemon.DaemonJournal(self.file)

    def append(self, number: int) -> None:
        self.writer.write_ahead(Change(number))

    def close(self) -> None:
        self.writer.close()
        del self.writer

    def read(self) -> list[int]:
        return [change.number for _, change in of_daemon.read(self.file).changes]


class OfDoor(Log):
    name = "door"
    mends = True

    def __init__(self, root: Path) -> None:
        self.directory = root / "log"
        self.open()
        self.file = self.directory / "00000000.log"

    def open(self) -> None:
        self.writer = of_door.LogWriter(self.directory)

    def append(self, number: int) -> None:
        self.writer.append(Request(number, 1.5, "ab", Step(1e-3)))

    def close(self) -> None:
        self.writer.close()
        del self.writer

    def read(self) -> list[int]:
        return [record.seq for record, _ in of_door.read(self.directory, Request)]


class Entries:
    """A ledger with one entry that is to be written, as often as it has to be."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def settle(self, joules: float | None, memory: int) -> list[Use]:
        uses, self.uses = self.uses, []
        return uses

    def put_back(self, uses: list[Use]) -> None:
        self.uses = [*uses, *self.uses]


class OfUses(Log):
    """A life of a pool writes a file of its own, so that no other continues it."""

    name = "uses"
    mends = True

    def __init__(self, root: Path) -> None:
        self.ledger, self.place, self.numbers = Entries(), UsesFile(), set[int]()
        super().__init__(root)

    def open(self) -> None:
        head = Uses("life", "tiny-1", "cpu", 1, 1.0, 1.0, [])
        self.writer = UsageFile(self.file, head, self.ledger, None)  # type: ignore[arg-type]

    def append(self, number: int) -> None:
        self.ledger.uses.append(Use(number, 0, "sorter"))
        self.writer._synced = 0.0  # so that it syncs each line
        self.writer.write()

    def close(self) -> None:
        self.writer.write(last=True)
        del self.writer

    def read(self) -> list[int]:
        for report in take_in._new_reports(self.file, self.place):
            self.numbers |= {use.entry for use in report.uses}
        return sorted(self.numbers)


POLICIES = (Ending, Refusing, Passing)
LOGS = {log.name: log for log in (*POLICIES, OfRun, InDatabase, InLogger, OfDaemon, OfDoor, OfUses)}


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    log = LOGS[request.param](tmp_path)
    yield log
    log.end()


def answer(work: Callable[[], list[int]]) -> list[int] | str:
    """Return what is read, or that the log is refused as damaged."""
    try:
        return work()
    except IntegrityError:
        return DAMAGED


def goes_on(log: Log) -> list[int]:
    """Open a log that was closed, write 4 and read it."""
    log.open()
    log.append(4)
    log.close()
    return log.read()


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BREAKS: dict[str, Callable[[bytes, list[int]], bytes]] = {  # of three records, by where each of them ends
    "a torn tail": lambda data, ends: data[:-5],
    "zeros of a power cut": lambda data, ends: data + bytes(64),
    "a changed bit in the last": lambda data, ends: changed(data, (ends[1] + ends[2]) // 2),
    "a changed bit in the middle": lambda data, ends: changed(data, (ends[0] + ends[1]) // 2),
    "a doubled last": lambda data, ends: data + data[ends[1] :],
}
USUAL = {  # what is read then, and after one more was written
    "a torn tail": ([1, 2], [1, 2, 4]),
    "zeros of a power cut": ([1, 2, 3], [1, 2, 3, 4]),
    "a changed bit in the last": ([1, 2], [1, 2, 4]),
    "a changed bit in the middle": ([1], DAMAGED),  # nothing behind it counts, and nothing is cut
    "a doubled last": ([1, 2, 3], [1, 2, 3, 4]),
}
# Followers had read all three, and know doubles by their numbers. The daemon passes over what is damaged, as
# people write there too. The door refuses to read on, where others end. The bill keeps what it has read.
OTHERWISE = {
    ("refusing", "a changed bit in the middle"): (DAMAGED, DAMAGED),
    ("passing", "a changed bit in the middle"): ([1, 3], [1, 3, 4]),
    **{(log.name, "a doubled last"): ([1, 2, 3, 3], [1, 2, 3, 3, 4]) for log in POLICIES},
    ("database", "a changed bit in the middle"): ([1, 2, 3], DAMAGED),
    ("logger", "a changed bit in the middle"): ([1, 2, 3], DAMAGED),
    ("daemon", "a changed bit in the middle"): ([1, 3], [1, 3, 4]),
    ("door", "a changed bit in the middle"): (DAMAGED, DAMAGED),
    ("run", "a doubled last"): ([1, 2, 3, 3], [1, 2, 3, 3, 4]),
    ("door", "a doubled last"): ([1, 2, 3, 3], [1, 2, 3, 3, 4]),
    ("uses", "a torn tail"): ([1, 2, 3], [1, 2, 3, 4]),
    ("uses", "a changed bit in the last"): ([1, 2, 3], [1, 2, 3, 4]),
    ("uses", "a changed bit in the middle"): ([1, 2, 3], [1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_log_goes_on_with_whole_records(log: Log, name: str) -> None:
    ends = []
    for number in (1, 2, 3):
        log.append(number)
        ends.append(log.file.stat().st_size)
    assert log.read() == [1, 2, 3]
    log.close()
    log.file.write_bytes(BREAKS[name](log.file.read_bytes(), ends))
    assert (answer(log.read), answer(lambda: goes_on(log))) == OTHERWISE.get((log.name, name), USUAL[name])


def test_a_write_that_fails_leaves_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bill's is written with the next."""
    write, written = os.write, 0

    def half(fd: int, data: bytes) -> int:
        nonlocal written
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, bytes(data)[: len(data) // 2])
        return written

    log.append(1)
    with monkeypatch.context() as full, suppress(OSError, LoradError):
        full.setattr(os, "write", half)
        log.append(2)
    assert written and log.read() == [1]
    log.append(3)
    assert log.read() == ([1, 2, 3] if log.name == "uses" else [1, 3])


def test_a_follower_survives_a_sync_that_fails(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read what may not be on disk. Journals cut that; the door and the bill mend it."""
    sync, seen = os.fsync, list[int]()

    def fail(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        seen.extend(log.read())
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    log.append(1)
    size = log.file.stat().st_size
    monkeypatch.setattr(os, "fsync", fail)
    with suppress(OSError, LoradError):
        log.append(2)
    kept = [1, 2] if log.mends else [1]
    assert seen == [1, 2] and log.read() == kept
    if log.mends:  # the page cache has lost it
        log.file.write_bytes(log.file.read_bytes()[:size].ljust(log.file.stat().st_size, b"\0"))
    log.append(3)
    assert log.read() == [*kept, 3]


def test_another_runs_journal_is_not_taken_in(tmp_path: Path) -> None:
    log = InDatabase(tmp_path)
    with of_run.JournalWriter(tmp_path / "other", "other", 1) as other:
        step(other, 1)
    log.file.write_bytes((tmp_path / "other").read_bytes())
    assert answer(log.read) == DAMAGED
    log.end()


def test_records_are_appended_in_one_place() -> None:
    """All others append what processes print."""
    output = {"lorad/children/process.py", "lorad/children/stacks.py", "cli/commands/specs/job.py"}
    output |= {"lorad/daemon/process/shim.py", "lorad/daemon/process/stacks.py"}
    appends = re.compile(r'O_APPEND \||[(,] ?"ab"')
    places = {str(path.relative_to(ROOT)) for path in own_code() if appends.search(path.read_text())}
    assert places - output == {"lorad/files/log.py"}
