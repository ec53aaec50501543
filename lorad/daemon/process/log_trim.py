"""Keep the logs of live processes small: the older half of a log that became too large is cut away.

The file stays the same, and its writers append to it meanwhile. Where the filesystem can take a range out of
a file, none of their bytes is lost; elsewhere those of an instant are. The file then begins with a line that
says how much was cut in all, so that byte offsets stay valid: see `api/verbs/logs.py`.
"""

import contextlib
import ctypes
import logging
import os
import re
import stat
from itertools import islice
from pathlib import Path

from lorad.box.paths import AttemptDir

log = logging.getLogger("lorad.daemon")

_MOST = 64  # logs of one attempt
_CHUNK = 1 << 20
_COLLAPSE_RANGE = 0x08  # fallocate(2)
_MARK = re.compile(rb"\[lorad\] (\d{1,18}) bytes of this log were cut before here[^\n]*\n")
_MARK_BYTES = 80


def cut_all(attempts: list[AttemptDir], limit: int) -> None:
    """Cut every log of these attempts that is larger than `limit` bytes."""
    for path in (path for attempt in attempts for path in logs_of(attempt)):
        try:
            if cut(path, limit):
                log.info("%s: larger than %d bytes, the older half was cut", path, limit)
        except OSError as error:
            log.warning("%s: cannot be cut: %s", path, error)


def logs_of(attempt: AttemptDir) -> list[Path]:
    """List the logs of the process itself, and of the servers and ranks that it started."""
    logs = [attempt.log] if attempt.log.exists() else []
    for directory in dict.fromkeys((attempt.root, attempt.work)):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            logs += [Path(entry.path) for entry in islice(entries, 8 * _MOST) if entry.name.endswith(".log")]
    return logs[:_MOST]


def open_log(path: Path, flags: int) -> int | None:
    """Open a log; None unless it is a regular file with one name that belongs to the owner of its directory.

    So a user who may write there cannot choose which file the daemon reads and cuts.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == path.parent.stat().st_uid:
        return fd
    os.close(fd)
    return None


def cut(path: Path, limit: int) -> bool:
    """Cut the older half of a log of more than `limit` bytes away; return whether it was. Raises OSError."""
    fd = open_log(path, os.O_RDWR)
    if fd is None:
        return False
    try:
        size = os.fstat(fd).st_size
        if size <= limit:
            return False
        before = cut_before(fd)
        block = os.fstatvfs(fd).f_bsize
        gone = (size - limit // 2) // block * block
        if not collapse(fd, gone):
            gone = max(gone, size - size // 2)  # what is copied must not overlap
            done = 0  # a crash on the way leaves the log as long as it was, and some of it twice
            while data := os.pread(fd, _CHUNK, gone + done):
                done += os.pwrite(fd, data, done)
            os.ftruncate(fd, done)
        # written over the first bytes of what stays, so that offsets are as before, less what was cut
        mark = f"[lorad] {before + gone} bytes of this log were cut before here".encode()
        os.pwrite(fd, mark.ljust(_MARK_BYTES - 1, b".") + b"\n", 0)
        return True
    finally:
        os.close(fd)


def collapse(fd: int, gone: int) -> bool:
    """Take the first bytes out of a file, at once; False where the filesystem cannot."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, _COLLAPSE_RANGE, 0, gone) == 0)


def cut_before(fd: int) -> int:
    """Count how many bytes were cut from a log in all."""
    match = _MARK.match(os.pread(fd, _MARK_BYTES, 0))
    return int(match[1]) if match else 0
