"""A log between two processes: one appends, the other follows; either may be killed at any time.

A log is a directory of segments `00000000.log`, `00000001.log`, …, each a row of records:

    u64 bytes | u64 seq | u32 crc32 of seq and frame | frame (see `lorad/protocol/frames.py`)

Numbers are little endian. Only the last append can be torn, as each is on disk before the next is written;
the writer cuts what is torn when it opens the log. Followers need no signal: how long they wait grows with
how long nothing came.

A follower may have read what a failed fsync left in the page cache, where it may count as clean though the
disk does not have it. It stays in the log therefore, and is written once more, at its place, and synced
before anything follows it.
"""

import asyncio
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from lorad.errors import Conflict, IntegrityError
from lorad.files import fsync
from lorad.protocol import frames

_HEAD = struct.Struct("<QQI")
_SEQ = struct.Struct("<Q")
_SEGMENT = 64 << 20  # bytes after which a new segment begins
_MOST = 1 << 30  # bytes of one record
_SHORTEST, _LONGEST = 0.002, 0.2  # seconds between two looks
_SHARE = 1 / 40  # of the time for which nothing came: that much later is what comes then seen


class _Record(Protocol):
    @property
    def seq(self) -> int: ...


T = TypeVar("T", bound=_Record)


class Position(NamedTuple):
    """The place behind a record. Segment -1: before all."""

    segment: int = -1
    offset: int = 0


START = Position()


def read(
    directory: Path, kind: type[T], start: Position = START, *, after: int = -1
) -> Iterator[tuple[T, Position]]:
    """Yield the whole records behind `start`, each with the place behind it; a torn tail ends it. A segment
    that the writer drops meanwhile is passed over. Records up to the seq `after` are passed over unread.

    Raises IntegrityError for a damaged record that others follow, and OSError.
    """
    segments = [number for number in _segments(directory) if number >= start.segment]
    for number in segments:
        offset = start.offset if number == start.segment else 0
        try:
            file = _path(directory, number).open("rb")
        except FileNotFoundError:
            continue
        with file:
            file.seek(offset)
            offset = _passed_over(file, offset, after)
            while (frame := _next(file, offset)) is not None:
                offset += _HEAD.size + len(frame)
                yield _decode(frame, kind, file.name), Position(number, offset)
                offset = _passed_over(file, offset, after)
            if number != segments[-1] and offset < os.fstat(file.fileno()).st_size:
                raise IntegrityError(f"{file.name} is damaged at byte {offset}, and more follows")


def read_segment(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the whole records of one segment. Raises as `read`."""
    offset = 0
    with path.open("rb") as file:
        while (frame := _next(file, offset)) is not None:
            offset += _HEAD.size + len(frame)
            yield _decode(frame, kind, file.name)


def first_segment(directory: Path) -> int:
    """Return the number of the oldest segment that is there; -1 for none."""
    return min(_segments(directory), default=-1)


def first_seqs(directory: Path, most: int) -> list[int]:
    """Return the seqs of the oldest records, at most so many."""
    segments = _segments(directory)
    return list(islice(_seqs(_path(directory, segments[0])), most)) if segments else []


async def follow(
    directory: Path, kind: type[T], start: Position = START
) -> AsyncIterator[tuple[T, Position]]:
    """Yield the records behind `start`, and then those that come, for ever; see `read`."""
    position, last = start, time.monotonic()
    while True:
        if may_have_more(directory, position):
            for record, behind in read(directory, kind, position):
                yield record, behind
                position = behind
                last = time.monotonic()
        await asyncio.sleep(pause(time.monotonic() - last))


def may_have_more(directory: Path, position: Position) -> bool:
    """Return False if nothing is behind a position, after a look at two names: most looks are in vain."""
    try:
        size = os.stat(_name(directory, position.segment)).st_size
    except FileNotFoundError:  # before the first record, or dropped
        return True
    return size > position.offset or os.path.exists(_name(directory, position.segment + 1))


def pause(silent: float) -> float:
    """Return the seconds until the next look at a log to which nothing came for so many seconds."""
    return min(_LONGEST, max(_SHORTEST, _SHARE * silent))


class LogWriter:
    """The one writer of a log.

    Raises Conflict when another process writes it, IntegrityError when it is damaged.
    """

    def __init__(self, directory: Path, *, segment: int = _SEGMENT) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory, self._most, self._highest = directory, segment, dict[int, int]()
        self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Conflict(f"another process writes to {directory}") from None
        self._fd, self._number = -1, -1
        self._doubtful: tuple[int, bytes] | None = None  # where the last append is, which may not be on disk
        try:
            self._open(max(_segments(directory), default=0))
            self._cut_torn_tail()
        except BaseException:
            self.close()
            raise

    def append(self, *records: _Record) -> int:
        """Write records and fsync them at once; returns their bytes.

        Raises OSError: they may be in the log all the same, and the next append begins by mending it.
        """
        data = b"".join(self._encoded(record) for record in records)
        if self._doubtful is not None:
            self._mend(*self._doubtful)
        if (size := os.fstat(self._fd).st_size) >= self._most:
            self._open(self._number + 1)
            size = 0
        self._doubtful, left = (size, data), memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, size)
            self._doubtful = None
            raise
        os.fsync(self._fd)
        self._doubtful = None
        return len(data)

    def _encoded(self, record: _Record) -> bytes:
        frame = b"".join(frames.encode(record))
        if len(frame) > _MOST:
            raise OSError(errno.EFBIG, f"a record of {len(frame)} bytes", str(self._directory))
        return _HEAD.pack(len(frame), record.seq, _crc(record.seq, frame)) + frame

    def drop(
        self, before: int, *, age: float = 0.0, kept: Callable[[Path], Iterable[_Record]] = lambda _: ()
    ) -> None:
        """Delete the oldest segments in which every seq is smaller than `before`, and to which nothing was
        written for `age` seconds; never the last one.

        kept: finds the records of a segment that are to stay: they are written once more before it goes.
        """
        for number in _segments(self._directory)[:-1]:
            path = _path(self._directory, number)
            if number not in self._highest:
                self._highest[number] = max(_seqs(path), default=-1)
            if self._highest[number] >= before or time.time() - path.stat().st_mtime < age:
                return
            if stays := [*kept(path)]:
                self.append(*stays)
            path.unlink()

    def close(self) -> None:
        for descriptor in {self._fd, self._lock} - {-1}:
            os.close(descriptor)
        self._fd = self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, number: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        opened = os.open(_path(self._directory, number), flags, 0o600)
        try:
            fsync(self._directory)
        except OSError:
            os.close(opened)
            raise
        if self._fd != -1:
            os.close(self._fd)
        self._fd, self._number = opened, number

    def _cut_torn_tail(self) -> None:
        """Leave whole records, the last of which may be one whose fsync failed."""
        end = last = 0
        with _path(self._directory, self._number).open("rb") as file:
            while (frame := _next(file, end)) is not None:
                last, end = end, end + _HEAD.size + len(frame)
            os.ftruncate(self._fd, end)
            file.seek(last)
            self._mend(last, file.read(end - last))

    def _mend(self, place: int, data: bytes) -> None:
        """Write the last append once more, as far as it is there as a whole, and cut it otherwise."""
        self._open(self._number)
        if os.fstat(self._fd).st_size < place + len(data):
            os.ftruncate(self._fd, place)
        else:
            # on a descriptor without O_APPEND, with which pwrite would append
            again = os.open(_path(self._directory, self._number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.pwrite(again, left, place + len(data) - len(left)) :]
            finally:
                os.close(again)
        os.fsync(self._fd)
        self._doubtful = None


def _segments(directory: Path) -> list[int]:
    """List the numbers of the segments, in order."""
    return sorted(int(path.stem) for path in directory.glob("[0-9]*.log"))


def _path(directory: Path, number: int) -> Path:
    return Path(_name(directory, number))


def _name(directory: Path, number: int) -> str:
    return f"{directory}/{number:08d}.log"


def _crc(seq: int, frame: bytes) -> int:
    return zlib.crc32(frame, zlib.crc32(_SEQ.pack(seq)))


def _next(file: BufferedReader, offset: int) -> bytes | None:
    """Read the frame of the record at `offset`, where the file stands; None at the end or at a torn tail.

    Raises IntegrityError when what is damaged is not the last record.
    """
    left = os.fstat(file.fileno()).st_size - offset
    head = file.read(_HEAD.size)
    if left < _HEAD.size or len(head) < _HEAD.size:
        return None
    length, seq, crc = _HEAD.unpack(head)
    if length > left - _HEAD.size and length <= _MOST:
        return None
    frame = file.read(length) if length <= _MOST else b""
    if length and len(frame) == length and _crc(seq, frame) == crc:
        return frame
    if length == left - _HEAD.size or not any(head + frame + file.read()):  # zeros: of a power cut
        return None
    raise IntegrityError(f"{file.name} is damaged at byte {offset}, and more follows")


def _passed_over(file: BufferedReader, offset: int, after: int) -> int:
    """Have the file stand at the first record from `offset` on whose seq is larger than `after`, or at what
    is no whole record; return where that is.
    """
    if after < 0:
        return offset
    size = os.fstat(file.fileno()).st_size
    while size - offset >= _HEAD.size:
        length, seq, _ = _HEAD.unpack(file.read(_HEAD.size))
        if seq > after or not 0 < length <= size - offset - _HEAD.size:
            break
        offset += _HEAD.size + length
        file.seek(offset)
    file.seek(offset)
    return offset


def _seqs(path: Path) -> Iterator[int]:
    """Yield the seq of each record, without reading the records."""
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, seq, _ = _HEAD.unpack(head)
            yield seq
            file.seek(length, os.SEEK_CUR)


def _decode(frame: bytes, kind: type[T], name: str) -> T:
    try:
        prefix = frames.parse_prefix(frame[: frames.PREFIX.size])
        return frames.decode(prefix, frame[frames.PREFIX.size :], kind)
    except frames.BadFrame as error:
        raise IntegrityError(f"{name} has a record that this lorad does not understand: {error}") from error
