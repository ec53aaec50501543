"""Append-only logs: one process appends records to a file, others read it, each may be killed at any time.

All logs have one rule, in which a log chooses where it says "or":

    a write fails        Its bytes are cut, at the latest before the next record.
    a sync fails         The record is cut, as it may not be on disk; a reader that has it notices that.
                         Or ("mend") it stays, as a reader may have acted on it. It is written once more, at
                         its place, and synced before anything follows it, since the page cache may take it
                         for clean.
    the tail is torn     It is cut when the log is opened. Or (without a form) it stays, as people write there
                         too, and the next record begins behind a line end.
    a record is damaged  Readers end there, or pass over it, or refuse to read on. A writer whose form refuses
                         cuts nothing where whole records follow.

The form of a log says how its records are found: `lines` of text, or the frames of `lorad/tinker/log.py`.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Generic, Literal, Self, TypeVar

from lorad.errors import IntegrityError
from lorad.files import fsync

T = TypeVar("T")

Form = Callable[[BufferedReader, Path], tuple[T | None, int] | None]
"""Reads the record that begins where a file stands, and returns it with its length in bytes. In the place of
a record that is passed over stands None. At the end, and at a torn record, it returns None alone. The path is
what errors call the file."""
_Damage = Literal["end", "pass", "refuse"]
_CHUNK = 1 << 16


def lines(
    decode: Callable[[bytes], T | None], damage: _Damage, *, most: int = 1 << 62, hint: str = ""
) -> Form[T]:
    """Make the form of a log whose records are lines.

    decode: makes the record of a line, whose end is part of it; None where it is torn or damaged.
    damage: what readers do about a damaged line.
    most: bytes of the longest line; a longer one raises IntegrityError.
    hint: what to do about a longer one.
    """

    def take(file: BufferedReader, path: Path) -> tuple[T | None, int] | None:
        line = file.readline(most + 1)
        record = decode(line) if 0 < len(line) <= most else None
        if record is not None:
            return record, len(line)
        offset = file.tell() - len(line)
        if len(line) > most:
            what = f"the record at byte {offset} is longer than {most} bytes"
            raise IntegrityError(f"{path}: {what}", hint=hint)
        if damage == "refuse" and (whole := sum(decode(other) is not None for other in file)):
            raise damaged(path, offset, f"{whole} whole records follow")
        return (None, len(line)) if damage == "pass" and line.endswith(b"\n") else None

    return take


def damaged(path: Path, offset: int, follows: str) -> IntegrityError:
    """Make the error of a log that has more records behind a damaged one."""
    return IntegrityError(
        f"{path} is damaged at byte {offset}, and {follows}",
        hint=f"Restore it from a copy, or give up what follows: `truncate -s {offset} {path}`.",
    )


def read(file: BufferedReader, path: Path, form: Form[T], offset: int = 0) -> Iterator[tuple[T, int]]:
    """Yield the records behind a byte offset, each with its end. Raises OSError, and what the form raises."""
    file.seek(offset)
    while (taken := form(file, path)) is not None:
        record, size = taken
        offset += size
        if record is not None:
            yield record, offset


def lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log, the last first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        rest = b""
        while end:
            start = max(0, end - max(_CHUNK, len(rest)))
            file.seek(start)
            rest, *whole = (file.read(end - start) + rest).splitlines(keepends=True) or [b""]
            yield from reversed(whole)
            end = start
        if rest:
            yield rest


class AppendLog(Generic[T]):
    """A log to which this process alone appends."""

    def __init__(
        self, path: Path, form: Form[T] | None, *, mends: bool = False, lock: bool = False, links: bool = True
    ) -> None:
        """Open a file, or make it, for its owner alone.

        form: finds the whole records, behind which a torn tail is cut; None lets it stay as a line.
        mends: whether a record whose sync failed stays, and is mended.
        lock: whether to raise BlockingIOError while another process has the log open.
        links: whether `path` itself may be a symbolic link.

        Raises OSError, and what the form raises.
        """
        self.path = path
        self.last: T | None = None  # that the file had when it was opened; None without a form
        self._form = form
        self._mends = mends
        self._doubtful: tuple[int, bytes] | None = None  # where the last append is, and what stays of it
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
        self._fd = os.open(path, flags, 0o600)
        try:
            if lock:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if form is not None:
                start = end = 0
                with open(self._fd, "rb", closefd=False) as file:
                    for record, behind in read(file, path, form):
                        self.last = record
                        start = end
                        end = behind
                    self.cut(end)
                    if mends:  # its sync may have failed before its writer died
                        file.seek(start)
                        self._doubtful = (start, file.read(end - start))
                        self.settle()
            with contextlib.suppress(PermissionError):  # a shared daemon's, which made the file and did this
                fsync(path.parent)  # the file may be new
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, data: bytes, *, sync: bool = True) -> int:
        """Append records, and with `sync` have all appended ones on disk. Returns where they begin.

        Raises OSError. Nothing of them counts then, unless they are only not synced and the log mends that.
        """
        self.settle()
        size = self.size
        if self._form is None and size and os.pread(self._fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        self._doubtful = (size, data if self._mends else b"")
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            if sync:
                os.fsync(self._fd)
        except OSError:
            if left or not self._mends:
                self.cut(size)
            raise
        self._doubtful = None
        return size

    def cut(self, place: int) -> None:
        """Take back what was appended from a place on. Raises OSError."""
        os.ftruncate(self._fd, place)
        self._doubtful = None

    def settle(self) -> None:
        """Cut or mend the last records if they failed and that could not be done yet. Raises OSError."""
        if self._doubtful is None:
            return
        place, data = self._doubtful
        if not data or self.size < place + len(data):
            self.cut(place)
            return
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW  # but no O_APPEND, with which pwrite would append
        with open(os.open(self.path, flags), "wb", buffering=0) as again:
            left = memoryview(data)
            while left:
                left = left[os.pwrite(again.fileno(), left, place + len(data) - len(left)) :]
            os.fsync(again.fileno())
        self._doubtful = None

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
