"""The directory of an agent, and the leftovers of killed ones."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import lorad
from lorad.box.paths import MEMORY
from lorad.children.process import sweep

_LEAST_FREE = 256 << 20  # bytes of the memory file system, for adapters to lie there
_LOCK = "life.lock"


@dataclass(frozen=True)
class Places:
    """The directory of the present life, which is 0700 and has a short name.

    `adapters` in it lies in memory where there is room; `python` in it holds lorad alone, without its
    dependencies.
    """

    directory: Path

    @classmethod
    @contextlib.contextmanager
    def make(cls) -> Iterator[Self]:
        """Make the directory, and remove it at the end."""
        prefix = f"lorad-node-{os.getuid()}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):  # by agents that were killed
            with contextlib.suppress(OSError):
                if left.lstat().st_uid != os.getuid() or left.is_symlink():
                    continue
                with (left / _LOCK).open("r") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    for record in left.glob("*.record"):
                        sweep(record)
                    _remove(left)
        directory = Path(tempfile.mkdtemp(prefix=prefix))
        memory: Path | None = None  # where there is room
        with contextlib.suppress(OSError):
            space = os.statvfs(MEMORY)
            if space.f_bavail * space.f_frsize >= _LEAST_FREE:
                memory = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY))
        try:
            draft = directory / f".{_LOCK}"
            with draft.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                draft.rename(directory / _LOCK)  # whoever sees it finds it locked
                if memory is None:
                    (directory / "adapters").mkdir(mode=0o700)
                else:
                    (directory / "adapters").symlink_to(memory)
                (directory / "python").mkdir(mode=0o700)
                (directory / "python" / "lorad").symlink_to(Path(lorad.__file__).parent)
                yield cls(directory)
        finally:
            _remove(directory)


def _remove(directory: Path) -> None:
    memory = directory / "adapters"
    if memory.is_symlink():
        shutil.rmtree(memory.readlink(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
