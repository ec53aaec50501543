"""The daemon's own journal, `LORAD_HOME/journal.jsonl`: who did what, and what the database can be rebuilt
from.

It holds one JSON object a line, fsynced: {at, kind, …}. Lines of kind `rows` and `all` are changes of the
database, see `lorad/store/record.py`: {…, number, rows, gone, crc}. All other lines are for people.
"""

import contextlib
import errno
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

import lorad
from lorad.errors import StorageError
from lorad.files import log, open_file
from lorad.store.record import Change

_CRC = b',"crc":'
ROWS = "rows"
ALL = "all"
STARTED = "started"


class DaemonJournal(log.AppendLog[Any]):
    """The daemon's journal, open for writing. A torn last line is closed before the next one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, None)
        self._undo: int | None = None  # where the file ends without the change that was written last

    def tell_start(self, schema: str) -> None:
        """Write that a daemon of this lorad has started. Raises StorageError; then nothing was written."""
        about = {"at": time.time(), "kind": STARTED, "version": lorad.__version__, "schema": schema}
        self._append(msgspec.json.encode(about) + b"\n")

    def write_ahead(self, change: Change, *, all: bool = False) -> None:
        """Raises StorageError; then nothing was written."""
        self._undo = None
        about = {"at": time.time(), "kind": ALL if all else ROWS}
        body = msgspec.json.encode(about | msgspec.to_builtins(change))
        self._undo = self._append(body[:-1] + _CRC + str(zlib.crc32(body)).encode() + b"}\n")

    def undo(self) -> None:
        """Cut the last change off. Should that fail, the next change has its number and so voids it."""
        if self._undo is not None:
            with contextlib.suppress(OSError):
                self.cut(self._undo)
            self._undo = None

    def _append(self, line: bytes) -> int:
        """Write a line and return where it begins. Raises StorageError; then nothing was written."""
        try:
            return self.write(line)
        except OSError as error:
            remedy = "Free some space or inodes (`df -h`, `df -i`)"
            if error.errno == errno.EROFS:
                remedy = "The file system became read-only: see `dmesg` why, mount it for writing"
            hint = f"Nothing was changed. {remedy}, and ask again."
            raise StorageError(f"{self.path}: {error.strerror}", hint=hint) from error


class JournalContent(NamedTuple):
    """The content of a journal.

    changes: the changes that were committed, each with its kind; one of the whole database comes first.
    damaged: numbers of the lines that cannot be read.
    """

    changes: list[tuple[str, Change]]
    damaged: list[int]


class _Line(Struct):
    kind: str


def read(path: Path) -> JournalContent:
    """Read all of a journal; nothing when there is none. Raises OSError."""
    journal = JournalContent([], [])
    if not path.exists():
        return journal
    with open_file(path) as file:
        for number, ((kind, content), _) in enumerate(log.read(file, path, log.lines(_decode, "pass")), 1):
            if isinstance(content, Change):
                changes = journal.changes
                # an earlier change with the same number was never committed
                while changes and (kind == ALL or changes[-1][1].number >= content.number):
                    changes.pop()
                changes.append((kind, content))
            elif content is None:
                journal.damaged.append(number)
    return journal


def _decode(line: bytes) -> tuple[str, Change | dict[str, Any] | None]:
    """Decode the kind of a line and its content; None when it is torn or damaged."""
    if not line.strip():
        return "", {}
    try:
        kind = msgspec.json.decode(line, type=_Line).kind
        if kind not in (ROWS, ALL):
            return kind, msgspec.json.decode(line, type=dict)
        body, _, crc = line.rstrip(b"}\n").rpartition(_CRC)
        whole = line.endswith(b"}\n") and zlib.crc32(body + b"}") == int(crc)
        return kind, msgspec.json.decode(body + b"}", type=Change) if whole else None
    except (msgspec.MsgspecError, ValueError):
        return "", None


def backwards(path: Path) -> Iterator[tuple[str, Change | dict[str, Any] | None]]:
    """Yield the kind and the content of each line, the newest first; see `_decode`."""
    return map(_decode, log.lines_backwards(path))
