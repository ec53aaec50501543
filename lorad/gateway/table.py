"""`gateway/table.json`: what is served under which name, as the daemon last wrote it."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)


class Served(Struct, frozen=True):
    """A version, and where it is served. socket: of the pool that is up; None when there is none. owner_uid:
    whose gateway serves it, where a daemon is shared."""

    run: str
    version: int
    sha256: str
    model_path: str
    socket: str | None
    path: str | None = None
    created_at: float = 0.0
    owner_uid: int | None = None

    @property
    def name(self) -> str:
        return f"{self.run}@{self.version}"


class Names(Struct, frozen=True):
    """aliases: to names of `versions`, which are `run@number`."""

    aliases: dict[str, str] = {}
    versions: dict[str, Served] = {}


class Table:
    """The daemon replaces the file whole; what is asked of this table is answered from the newest one.

    The file that was read stays open: a later one cannot have its inode, so that no change is missed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._names = Names()

    def names(self) -> Names:
        """A file that cannot be read changes nothing."""
        try:
            if not self._is_newest():
                self._read()
        except FileNotFoundError:
            self.close()
            self._names = Names()
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s: %s", self._path, error)
        return self._names

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_newest(self) -> bool:
        there = self._path.stat()
        if self._fd < 0:
            return False
        ours = os.fstat(self._fd)
        return (ours.st_dev, ours.st_ino, ours.st_mtime_ns) == (there.st_dev, there.st_ino, there.st_mtime_ns)

    def _read(self) -> None:
        with contextlib.ExitStack() as stack:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            size = os.fstat(fd).st_size
            self._names = msgspec.json.decode(os.pread(fd, size, 0), type=Names)
            stack.pop_all()
            self.close()
            self._fd = fd
