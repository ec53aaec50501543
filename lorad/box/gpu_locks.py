"""The files whose locks hold the GPUs of a machine, one for each UUID, for all users of lorad there."""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

DIRECTORY = Path("/tmp/lorad-devices")  # whatever TMPDIR a process has: all must find the same locks


def make_directory(directory: Path) -> Path:
    """Have a directory where every user may make a lock."""
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)
        directory.chmod(0o1777)
    return directory


def make_lock(directory: Path, uuid: str) -> Path:
    """Return the file of a GPU, made if need be."""
    path = make_directory(directory) / f"{uuid}.lock"
    with contextlib.suppress(FileExistsError):
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(lock, 0o644)  # whatever the umask: who cannot open it can never have the device
        os.close(lock)
    return path


def take_lock(directory: Path, uuid: str) -> int:
    """Lock a GPU as long as some process has the file descriptor, which children may inherit.

    Raises BlockingIOError when it is held, and OSError for what is no lock.
    """
    file = os.open(make_lock(directory, uuid), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{directory / uuid}.lock is no file")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.set_inheritable(file, True)
    except BaseException:
        os.close(file)
        raise
    return file
