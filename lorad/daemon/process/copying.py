"""Copy the files of a directory from one user to another: neither gets access to more than they may open
themselves.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import BinaryIO

from lorad.adapters.directory import fsync
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.users import User
from lorad.errors import IntegrityError


def files_into(
    source: Path, target: Path, names: Iterable[str], owner: User | None, reader: User | None
) -> None:
    """Copy files into `target`, an empty directory, and sync them to disk.

    Raises OSError, and IntegrityError for a name that leads out of the directory.
    """
    for name in names:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise IntegrityError(
                f"{source}: its manifest names {name!r}", hint="Somebody changed it; do not use it."
            )
        with as_user(owner):
            file = opened(source / name)
        with file, as_user(reader):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with open(target / name, "xb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
    with as_user(reader):
        for path in (*(path for path in target.rglob("*") if path.is_dir()), target):
            fsync(path)


def opened(path: Path) -> BinaryIO:
    """Open a plain file, which no pipe or link is. Raises OSError."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
