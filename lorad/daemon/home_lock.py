"""A home has one daemon: the lock that the daemon holds, and the check that the home can be written to."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import IO

from lorad.box.paths import Home
from lorad.errors import Conflict, StorageError
from lorad.protocol.listener import answers

GOODBYE_SECONDS = 2.0


@contextlib.contextmanager
def writable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "LORAD_HOME is to be a directory that can be written to."
        raise StorageError(f"{error.filename}: {error.strerror}", hint=hint) from error


@contextlib.contextmanager
def lock(home: Home) -> Iterator[None]:
    """Take the lock that keeps a second daemon out of the home. Raises Conflict, StorageError."""
    with contextlib.ExitStack() as stack:
        with writable():
            file = stack.enter_context(open(home.daemon_lock, "a+"))
        deadline = time.monotonic() + 2 * GOODBYE_SECONDS
        while not _is_ours(file):
            if answers(home.socket) or time.monotonic() > deadline:
                raise Conflict(
                    f"a daemon works in {home.root} already", hint="`lorad daemon status` shows it."
                )
            time.sleep(0.02)  # one that is ending
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _is_ours(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
