"""Keeps how far a logger has written a journal, in a small file for each run and logger.

The logger is flushed first, then the cursor moves, and only to the beginning of a step or a segment: so all
figures of a step are put again, whatever dies in between.
"""

import fcntl
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from lorad.errors import Conflict
from lorad.files import fsync, read_file, write_whole

_BYTES = 4096


class Cursor(Struct, frozen=True):
    """The place in the journal, in bytes, at which the next life begins."""

    offset: int = 0
    segment: int = 0  # its number
    step: int = -1  # the last one before; -1: none
    segment_offset: int = 0  # where the segment begins
    segment_after: int = -1  # the step from which the segment continues
    done: int = 0  # the offset up to which everything is written and closed; 0 before that


class CursorFile:
    """A cursor on disk. One process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def hold(self) -> None:
        """Hold the cursor. Raises Conflict while another process writes with it, and OSError."""
        if self._lock is not None:
            return
        is_new = not self.path.parent.exists()
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        if is_new:
            fsync(self.path.parent.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Conflict(
                f"another process writes with {self.path}", hint="Wait until it is done, or stop it."
            ) from None
        self._lock = lock

    def load(self) -> Cursor:
        """Read the cursor; one that cannot be read is the beginning, so that all is written again."""
        try:
            return msgspec.json.decode(read_file(self.path, _BYTES), type=Cursor)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return Cursor()

    def save(self, cursor: Cursor) -> None:
        """Put the cursor on disk. Raises OSError."""
        write_whole(self.path, msgspec.json.encode(cursor))

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
