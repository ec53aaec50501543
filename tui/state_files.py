"""Keeps what a user chose in files of theirs, in $XDG_STATE_HOME/lorad, else in ~/.local/state/lorad."""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from lorad.files import read_file, write_whole

_LARGEST = 1 << 20  # bytes

Kept = TypeVar("Kept")


def state_file(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lorad" / name


def read_state(path: Path, type_: type[Kept]) -> Kept:
    """Read a file. Raises OSError, and ValueError where it holds something else."""
    try:
        return msgspec.json.decode(read_file(path, _LARGEST), type=type_)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def write_state(path: Path, kept: object) -> None:
    """Put a file in place, and its directory. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(kept), durable=False)
