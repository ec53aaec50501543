"""How much the files of runs take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Disks:
    """Bytes of all runs by the uid of their owner, measured in a thread. at: monotonic."""

    used: dict[int, int] = field(default_factory=dict)
    at: float = float("-inf")
    is_measured: bool = False


def bytes_of(directories: Iterable[Path]) -> int:
    """On disk, files with several names once. What goes away meanwhile does not count. Runs in a thread."""
    total, seen, left = 0, set(), [os.fspath(path) for path in directories]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    there = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif there.st_nlink == 1 or (there.st_dev, there.st_ino) not in seen:
                        seen.add((there.st_dev, there.st_ino))
                        total += there.st_blocks * 512
    return total
