"""A log between two processes: one appends, the other follows; either may be killed at any time.

A log is a directory of segments `00000000.log`, `00000001.log`, …, each a row of records:

    u64 bytes | u64 seq | u32 crc32 of seq and frame | frame (see `lorad/protocol/frames.py`)

Numbers are little endian. Each append is on disk before the next is written. Followers need no signal: the
longer nothing came, the longer they wait before they look again. A record whose sync failed is mended, and
damage refused: see `lorad/files/log.py`.
"""

import asyncio
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, Self, TypeVar

from lorad.errors import Conflict, IntegrityError
from lorad.files import log, open_file
from lorad.protocol import frames

_HEAD = struct.Struct("<QQI")
_SEQ = struct.Struct("<Q")
_SEGMENT = 64 << 20  # bytes after which a new segment begins
_MOST = 1 << 30  # bytes of one record
_SHORTEST = 0.002  # seconds between two looks, at least
_LONGEST = 0.2  # seconds between two looks, at most
_SHARE = 1 / 40  # of the time for which nothing came is the wait until the next look


class _Record(Protocol):
    @property
    def seq(self) -> int: ...


T = TypeVar("T", bound=_Record)
R = TypeVar("R")


class Position(NamedTuple):
    """The place behind a record; segment -1 is before all records."""

    segment: int = -1
    offset: int = 0


START = Position()


def read(
    directory: Path, kind: type[T], start: Position = START, *, after: int = -1
) -> Iterator[tuple[T, Position]]:
    """Yield the whole records behind `start`, each with the place behind it, up to a torn tail.

    A segment that the writer drops meanwhile is passed over, and so, unread, are the records up to the seq
    `after`. Raises IntegrityError for a damaged record that others follow, and OSError.
    """
    segments = [number for number in segments_of(directory) if number >= start.segment]
    for number in segments:
        offset = start.offset if number == start.segment else 0
        try:
            file = open_file(path := Path(_name(directory, number)))
        except FileNotFoundError:
            continue
        with file:
            form = _frames(partial(_decode, kind), after=after, is_last=number == segments[-1])
            for record, behind in log.read(file, path, form, offset):
                yield record, Position(number, behind)


def first_seqs(directory: Path, most: int) -> list[int]:
    """Return the seqs of the oldest records, `most` at most."""
    segments = segments_of(directory)
    return list(islice(_seqs(_name(directory, segments[0])), most)) if segments else []


async def follow(
    directory: Path, kind: type[T], start: Position = START
) -> AsyncIterator[tuple[T, Position]]:
    """Yield the records behind `start`, and then the records that come, for ever; see `read`."""
    position = start
    last = time.monotonic()
    while True:
        if may_have_more(directory, position):
            for record, behind in read(directory, kind, position):
                yield record, behind
                position = behind
                last = time.monotonic()
        await asyncio.sleep(pause(time.monotonic() - last))


def may_have_more(directory: Path, position: Position) -> bool:
    """Return False if nothing stands behind a position, after a look at two names: most looks are in vain."""
    try:
        size = os.stat(_name(directory, position.segment)).st_size
    except FileNotFoundError:  # before the first record, or dropped
        return True
    return size > position.offset or os.path.exists(_name(directory, position.segment + 1))


def pause(silent: float) -> float:
    """Return the seconds until the next look at a log to which nothing came for so many seconds."""
    return min(_LONGEST, max(_SHORTEST, _SHARE * silent))


class LogWriter:
    """Writes a log, as the only process that does.

    Raises Conflict when another process writes it, IntegrityError when it is damaged.
    """

    def __init__(self, directory: Path, *, segment: int = _SEGMENT) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._most = segment
        self._highest = dict[int, int]()
        self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._log = self._open(max(segments_of(directory), default=0))
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise Conflict(f"another process writes to {directory}") from None
            raise

    def append(self, *records: _Record) -> int:
        """Write records, fsync them at once, and return their bytes.

        Raises OSError: they may be in the log all the same, and the next append begins by mending it.
        """
        data = b""
        for record in records:
            frame = b"".join(frames.encode(record))
            if len(frame) > _MOST:
                raise OSError(errno.EFBIG, f"a record of {len(frame)} bytes", str(self._directory))
            data += _HEAD.pack(len(frame), record.seq, _crc(record.seq, frame)) + frame
        self._log.settle()
        if self._log.size >= self._most:
            following = self._open(int(self._log.path.stem) + 1)
            self._log.close()
            self._log = following
        self._log.write(data)
        return len(data)

    def _open(self, number: int) -> log.AppendLog[bytes]:
        path = Path(_name(self._directory, number))
        return log.AppendLog(path, _frames(lambda frame, _: frame), mends=True, links=False)

    def drop(
        self, before: int, kind: type[T] | None = None, stays: Callable[[T], bool] = bool, *, age: float = 0.0
    ) -> None:
        """Delete the oldest segments in which every seq is smaller than `before`, but never the last segment.

        Args:
            kind: What the records are, where some of them stay.
            stays: Says whether a record stays, which is then written once more.
            age: For how many seconds nothing was written to a segment that is deleted.
        """
        for number in segments_of(self._directory)[:-1]:
            path = Path(_name(self._directory, number))
            if number not in self._highest:
                self._highest[number] = max(_seqs(str(path)), default=-1)
            if self._highest[number] >= before or time.time() - path.stat().st_mtime < age:
                return
            if kind is not None:
                with open_file(path) as file:
                    records = log.read(file, path, _frames(partial(_decode, kind)))
                    if again := [record for record, _ in records if stays(record)]:
                        self.append(*again)
            path.unlink()

    def close(self) -> None:
        self._log.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def segments_of(directory: Path) -> list[int]:
    """List the numbers of the segments, in order."""
    return sorted(int(path.stem) for path in directory.glob("[0-9]*.log"))


def _name(directory: Path, number: int) -> str:
    return f"{directory}/{number:08d}.log"


def _crc(seq: int, frame: bytes) -> int:
    return zlib.crc32(frame, zlib.crc32(_SEQ.pack(seq)))


def _frames(decode: Callable[[bytes, Path], R], *, after: int = -1, is_last: bool = True) -> log.Form[R]:
    """Make the form of a segment.

    Args:
        decode: Makes the record of a frame; the path is for errors.
        after: Records up to this seq are passed over unread.
        is_last: No segment follows, so that the last record may be torn.
    """

    def take(file: BufferedReader, path: Path) -> tuple[R | None, int] | None:
        offset = file.tell()
        left = os.fstat(file.fileno()).st_size - offset - _HEAD.size
        head = file.read(_HEAD.size)
        is_torn = left < 0 or len(head) < _HEAD.size
        if not is_torn:
            length, seq, crc = _HEAD.unpack(head)
            if seq <= after and 0 < length <= left:
                file.seek(length, os.SEEK_CUR)
                return None, _HEAD.size + length
            is_torn = left < length <= _MOST
            frame = b"" if is_torn or length > _MOST else file.read(length)
            if frame and len(frame) == length and _crc(seq, frame) == crc:
                return decode(frame, path), _HEAD.size + length
            is_zeros = not is_torn and not any(head + frame + file.read())  # as a power cut leaves them
            is_torn = is_torn or length == left or is_zeros
        if head and not (is_torn and is_last):
            raise log.damaged(path, offset, "more follows")
        return None

    return take


def _decode(kind: type[T], frame: bytes, path: Path) -> T:
    try:
        prefix = frames.parse_prefix(frame[: frames.PREFIX.size])
        return frames.decode(prefix, frame[frames.PREFIX.size :], kind)
    except frames.BadFrame as error:
        raise IntegrityError(f"{path} has a record that this lorad does not understand: {error}") from error


def _seqs(name: str) -> Iterator[int]:
    """Yield the seq of each record, without reading the records."""
    with open(name, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, seq, _ = _HEAD.unpack(head)
            yield seq
            file.seek(length, os.SEEK_CUR)
