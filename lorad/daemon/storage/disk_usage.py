"""Measure how many bytes lie where. A file that several directories share is counted once."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lorad.daemon.storage.prune import Doomed


def measure(items: Iterable[Doomed]) -> dict[Path, int]:
    """Measure the bytes of files."""
    return {item.path: used([item.path]) for item in items}


def used(roots: Iterable[Path]) -> int:
    """Add up what files and directories take; what lies below several of `roots` counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path in roots:
        for about in _files_below(path):
            key = about.st_dev, about.st_ino
            if key not in seen:
                total += about.st_size
                if about.st_nlink > 1 or len(seen) < 1 << 20:
                    seen.add(key)
    return total


def _files_below(path: Path) -> Iterator[os.stat_result]:
    """Yield the files below a path; those that disappear meanwhile are passed over."""
    try:
        about = path.lstat()
        if not path.is_dir() or path.is_symlink():
            yield about
            return
        with os.scandir(path) as entries:
            listed = list(entries)
    except OSError:
        return
    for entry in listed:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False)
        except OSError:
            continue
