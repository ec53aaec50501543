"""The two files by which the daemon and a process beside it talk: one side writes each, always whole."""

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from lorad.files import read_file, write_whole

TABLE = "table.json"  # the daemon writes it
STATE = "state.json"  # the process writes it
LONGEST = 500  # characters of what a fault says
_BYTES = 16 << 20
T = TypeVar("T", bound=Struct)


def read_table(path: Path, kind: type[T]) -> T:
    """Read a file; without one, an empty table. Raises OSError, and ValueError for a damaged one."""
    try:
        return msgspec.json.decode(read_file(path, _BYTES), type=kind)
    except FileNotFoundError:
        return kind()


def read_state(path: Path, kind: type[T]) -> T:
    """Read a file, which may be another user's; an empty state where it cannot be read."""
    try:
        return msgspec.json.decode(read_file(path, _BYTES, links=False), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return kind()


def write(path: Path, data: Struct, *, uid: int | None = None) -> None:
    """Put a file in place, with this owner. Raises OSError."""
    mode = 0o600 if uid is None else 0o400
    write_whole(path, msgspec.json.encode(data), mode=mode, uid=uid, durable=False)
