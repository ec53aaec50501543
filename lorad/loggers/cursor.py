"""Keeps how far a logger has written a journal, in a small file beside the journal for each run and logger.

The logger is flushed first, then the cursor moves, and only to where a step or a segment begins: so all
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
    """Where the next life begins.

    Attributes:
        offset: The place in the journal, in bytes.
        segment: The number of the segment that begins or continues there.
        step: The last step before it; -1 is none.
        segment_offset: Where the segment begins in the journal.
        segment_after: The step that the segment continues.
        done: The offset up to which everything is written and closed; 0 before that.
    """

    offset: int = 0
    segment: int = 0
    step: int = -1
    segment_offset: int = 0
    segment_after: int = -1
    done: int = 0


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
        """Read the cursor; return the beginning where it cannot be read, so that all is written again."""
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
