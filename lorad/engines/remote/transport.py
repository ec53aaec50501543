"""The directories that servers read adapters from: one for each load, written once.

They lie in memory (/dev/shm) where there is room: an adapter is written and read without touching a disk, and
nothing here has to survive, since the version's own files do.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import write_peft
from lorad.box.paths import MEMORY, memory_directory
from lorad.errors import StorageError

LEAST_FREE = 256 << 20  # bytes that the memory file system must have left for adapters to travel through it


class ServerTransport:
    """Writes adapters for servers, as PEFT directories that name `base` as their base. All methods block.

    called: the names that the server's target_modules have for linears, by leaf name, see `write_peft`.
    """

    def __init__(self, work: Path, base: str, called: Mapping[str, str] | None = None) -> None:
        self._base = base
        self._called = called or {}
        self._disk = work / "adapters"
        self.root = self._disk  # where there is no room in memory; the same in each life of a pool
        with contextlib.suppress(OSError):
            space = os.statvfs(MEMORY)
            if space.f_bavail * space.f_frsize >= LEAST_FREE and os.access(MEMORY, os.W_OK):
                self.root = memory_directory(work)
        for earlier in (self.root, self._disk):
            shutil.rmtree(earlier, ignore_errors=True)
        self.root.mkdir(mode=0o700, parents=True)

    def put(self, name: str, adapter: Adapter) -> Path:
        """Write an adapter under a new name; the directory appears whole. Raises StorageError."""
        root = self.root
        while True:
            temporary = root / f".tmp-{name}"
            try:
                if root != self.root:
                    root.mkdir(mode=0o700, exist_ok=True)
                temporary.mkdir(mode=0o700)
                write_peft(adapter, temporary, self._base, self._called)
                return temporary.rename(root / name)
            except OSError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if error.errno != errno.ENOSPC or root == self._disk:
                    raise StorageError(
                        f"{root / name} could not be written: {error.strerror or error}",
                        hint="Versions travel to the engine through this directory: free some space there, "
                        "then resume.",
                    ) from error
            root = self._disk

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove a directory, so that servers that are still asked to load it fail."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        for root in (self.root, self._disk):
            shutil.rmtree(root, ignore_errors=True)
