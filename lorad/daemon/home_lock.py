"""The lock by which a home has one daemon, and checks that the home can be written to and has locks."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator

from lorad.box.paths import Home
from lorad.errors import Conflict, StorageError
from lorad.protocol.listener import answers

GOODBYE_SECONDS = 2.0
LOCK_SECONDS = 10.0  # for a file server to answer


@contextlib.contextmanager
def writable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "LORAD_HOME is to be a directory that can be written to."
        raise StorageError(f"{error.filename}: {error.strerror}", hint=hint) from error


@contextlib.contextmanager
def lock(home: Home) -> Iterator[None]:
    """Take the lock that keeps a second daemon out of the home. Raises Conflict, StorageError.

    Both kinds of locks, the database's and the daemon's, are first tried in a thread, as a file server may
    not answer.
    """
    wrong = ["its file server does not answer when a file is locked"]

    def look() -> None:
        try:
            for take in (fcntl.lockf, fcntl.flock):
                with contextlib.suppress(BlockingIOError, PermissionError):  # somebody has it
                    take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    take(file, fcntl.LOCK_UN)
            wrong.clear()
        except OSError as error:
            wrong[:] = [f"its file system locks no files: {error.strerror}"]

    with contextlib.ExitStack() as stack:
        with writable():
            file = stack.enter_context(open(home.daemon_lock, "a+"))
        thread = threading.Thread(target=look, daemon=True, name="locks")
        thread.start()
        thread.join(LOCK_SECONDS)
        if wrong:
            hint = (
                "Set LORAD_HOME to a directory on a local disk, or have the file system mounted with locks."
            )
            raise StorageError(f"{home.root} cannot be used as home: {wrong[0]}", hint=hint)
        deadline = time.monotonic() + 2 * GOODBYE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if answers(home.socket) or time.monotonic() > deadline:
                    message = f"a daemon works in {home.root} already"
                    raise Conflict(message, hint="`lorad daemon status` shows it.") from None
            time.sleep(0.02)  # a daemon that is ending has it
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
