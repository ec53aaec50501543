"""The daemon's own journal, `LORAD_HOME/journal.jsonl`: who did what, and what the database can be rebuilt
from.

It holds one JSON object a line, fsynced: {at, kind, …}. Lines of kind `rows` and `all` are changes
of the database, see `lorad/store/record.py`: {…, number, rows, gone, crc}. All other lines are for people.
"""

import contextlib
import errno
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

import lorad
from lorad.errors import StorageError
from lorad.files import append, fsync
from lorad.store.record import Change

_CRC = b',"crc":'
_CHUNK = 1 << 16
ROWS, ALL, _STARTED = "rows", "all", "started"


class DaemonJournal:
    """Appends one line for each fact. A torn last line is closed before the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._undo: int | None = None  # where the file ends without the change that was written last
        if is_new:
            fsync(path.parent)

    def tell_start(self, schema: str) -> None:
        """Write that a daemon of this lorad has started. Raises StorageError; then nothing was written."""
        about = {"at": time.time(), "kind": _STARTED, "version": lorad.__version__, "schema": schema}
        self._write(msgspec.json.encode(about) + b"\n")

    def write_ahead(self, change: Change, *, all: bool = False) -> None:
        """Raises StorageError; then nothing was written."""
        self._undo = None
        about = {"at": time.time(), "kind": ALL if all else ROWS}
        body = msgspec.json.encode(about | msgspec.to_builtins(change))
        self._undo = self._write(body[:-1] + _CRC + str(zlib.crc32(body)).encode() + b"}\n")

    def undo(self) -> None:
        """Cut the last change off.

        If that fails too, the number of the next change shows that this one is void.
        """
        if self._undo is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._undo)
            self._undo = None

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, line: bytes) -> int:
        """Write a line and return where it begins. Raises StorageError; then nothing was written."""
        try:
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            return append(self._fd, line)
        except OSError as error:
            remedy = "Free some space or inodes (`df -h`, `df -i`)"
            if error.errno == errno.EROFS:
                remedy = "The file system became read-only: see `dmesg` why, mount it for writing"
            hint = f"Nothing was changed. {remedy}, and ask again."
            raise StorageError(f"{self.path}: {error.strerror}", hint=hint) from error


class Told(NamedTuple):
    """What a journal contains.

    changes: the changes that count; a change of the whole database comes first if there is one.
    damaged: numbers of the lines that cannot be read.
    """

    changes: list[tuple[str, Change]]
    damaged: list[int]

    @property
    def is_complete(self) -> bool:
        """Check whether `changes` holds all of the daemon's facts."""
        return bool(self.changes) and self.changes[0][0] == ALL


class _Line(Struct):
    kind: str


def read(path: Path) -> Told:
    """Read all of a journal; nothing when there is none. Raises OSError."""
    told = Told([], [])
    if not path.exists():
        return told
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            kind, found = _decode(line)
            if isinstance(found, Change):
                count(told.changes, kind, found)
            elif found is None:
                told.damaged.append(number)
    return told


def count(changes: list[tuple[str, Change]], kind: str, change: Change) -> None:
    """A change that has the number of an earlier one: that one was never committed."""
    while changes and (kind == ALL or changes[-1][1].number >= change.number):
        changes.pop()
    changes.append((kind, change))


def _decode(line: bytes) -> tuple[str, Change | dict[str, Any] | None]:
    """Decode the kind of a line and its content; None when it is torn or damaged."""
    try:
        kind = msgspec.json.decode(line, type=_Line).kind
        if kind not in (ROWS, ALL):
            return kind, msgspec.json.decode(line, type=dict)
        body, _, crc = line.rstrip(b"}\n").rpartition(_CRC)
        whole = line.endswith(b"}\n") and zlib.crc32(body + b"}") == int(crc)
        return kind, msgspec.json.decode(body + b"}", type=Change) if whole else None
    except (msgspec.MsgspecError, ValueError):
        return "", None


def last_change(path: Path) -> int | None:
    """Find the number of the newest change that is whole; None when there is none."""
    for line in _backwards(path):
        found = _decode(line)[1]
        if isinstance(found, Change):
            return found.number
    return None


def written_by(path: Path) -> dict[str, Any]:
    """Find the newest line that a daemon began with: {version, schema, …}; {} when there is none."""
    for line in _backwards(path):
        kind, found = _decode(line)
        if kind == _STARTED and isinstance(found, dict):
            return found
    return {}


def _backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end, rest, chunk = file.seek(0, os.SEEK_END), b"", _CHUNK
        while end:
            start, chunk = max(0, end - chunk), 2 * chunk
            file.seek(start)
            lines = (file.read(end - start) + rest).splitlines(keepends=True)
            end, rest = start, lines[0] if lines else b""
            yield from reversed(lines[1:])
        if rest:
            yield rest
