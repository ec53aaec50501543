"""Reads the table of what is served under which name, which the daemon writes: `lorad/protocol/served.py`."""

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from lorad.protocol.served import Names

log = logging.getLogger(__name__)


class GatewayTable:
    """Answers from the newest file; the daemon replaces the file whole.

    The last file that was read stays open: a later one cannot have its inode, so that no change is missed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._names = Names()

    def names(self) -> Names:
        """Return what the newest file says; a file that cannot be read changes nothing."""
        try:
            newest = self._path.stat()
            ours = os.fstat(self._fd) if self._fd >= 0 else None
            if ours is None or (ours.st_dev, ours.st_ino, ours.st_mtime_ns) != (
                newest.st_dev,
                newest.st_ino,
                newest.st_mtime_ns,
            ):
                with contextlib.ExitStack() as stack:
                    fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, fd)
                    size = os.fstat(fd).st_size
                    self._names = msgspec.json.decode(os.pread(fd, size, 0), type=Names)
                    stack.pop_all()
                    self.close()
                    self._fd = fd
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
