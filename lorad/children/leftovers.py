"""Clears up after a killed pool: processes, sockets, temporary files, adapters on their way to servers.

A pool that ends by itself leaves nothing, and the next life of a pool clears up as well.
`python -m lorad.children.leftovers DIRECTORY` calls `clean_leftovers` as another user, for that user's pool.
"""

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lorad.box.paths import memory_directory, private_directory
from lorad.children.process import sweep

LOCK = "life.lock"
_RECORDS = ("trainer.json", "granter.json", "engine-[0-9]*.json")  # of children, see `Child`


@contextlib.contextmanager
def living(directory: Path) -> Iterator[None]:
    """Keep others from clearing up a pool's directory inside the block; wait for one that does so now."""
    with open(directory / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def clean_leftovers(directory: Path) -> bool:
    """Clean up after the pool of a directory; return False when it lives, or is another user's.

    Blocks, usually for milliseconds, a few seconds where processes are left. Unremovable files stay.
    """
    with contextlib.suppress(OSError):
        if directory.stat().st_uid != os.getuid():  # a record names whom to kill: it must be our own
            return False
        with open(directory / LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for pattern in _RECORDS:
                for record in directory.glob(pattern):
                    sweep(record)
            for left in places(directory):
                shutil.rmtree(left, ignore_errors=True)
            return True
    return False


def places(directory: Path) -> list[Path]:
    """List the places for files of one life of a pool."""
    return [
        private_directory(directory),
        private_directory(directory / "trainer"),
        private_directory(directory / "grant"),
        memory_directory(directory),
        directory / "adapters",
    ]


if __name__ == "__main__":
    sys.exit(not clean_leftovers(Path(sys.argv[1])))
