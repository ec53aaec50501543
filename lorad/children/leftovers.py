"""What a pool that is over has left: processes, sockets, temporary files, adapters on their way to servers.

A pool that ends by itself leaves nothing, one that was killed does. Its next life clears up as well, should
there be one. `python -m lorad.children.leftovers DIRECTORY` does the same as `clean_leftovers`, for a pool of
another user, as that one.
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
    """Keep others from clearing up a pool's directory while the pool lives; waits for one that does."""
    with open(directory / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def clean_leftovers(directory: Path) -> bool:
    """Clean up after the pool whose files are in `directory`; False when it lives, or is another user's.

    Blocks, usually for milliseconds, a few seconds where processes are left. What cannot be removed stays.
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
    """List where a pool puts what belongs to one life of it."""
    return [
        private_directory(directory),
        private_directory(directory / "trainer"),
        private_directory(directory / "grant"),
        memory_directory(directory),
        directory / "adapters",
    ]


if __name__ == "__main__":
    sys.exit(not clean_leftovers(Path(sys.argv[1])))
