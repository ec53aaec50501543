"""Processes that outlive what started them: found by the LORAD_HOME that they serve, and killed.

/proc is read here without psutil, which takes ten times as long: a scan is made after thousands of tests.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def newest_pid() -> int:
    """Return the pid that was given last."""
    return int(Path("/proc/loadavg").read_text().split()[-1])


def kill_leftovers(home: Path, since: int = 0) -> None:
    """Kills every process of `home` until none runs. Exit statuses are left to their parents.

    since: `newest_pid()` of before `home` was made: older processes are not looked at.
    """
    while leftovers := [pid for pid in _pids(since) if _serves(pid, os.fsencode(home))]:
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids(since: int) -> Iterable[int]:
    """Return the numbers given after `since`, to threads too; all where they began anew."""
    if 0 < since <= (newest := newest_pid()):
        return range(since + 1, newest + 1)
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _serves(pid: int, home: bytes) -> bool:
    """Whether environment, command line or log name `home`; never true of this process and its threads.

    A process that gives itself a title writes over the first two, of which nothing is seen then.
    """
    place = f"/proc/{pid}"
    try:
        if not (command := _bytes(f"{place}/cmdline")):
            return False  # a zombie, or a thread of the kernel
        named = home in command or b"LORAD_HOME=" + home in _bytes(f"{place}/environ").split(b"\0")
    except OSError:
        return False
    named = named or any(home in _target(f"{place}/fd/{fd}") for fd in (1, 2))
    return named and not os.path.exists(f"/proc/self/task/{pid}")


def _bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _target(link: str) -> bytes:
    """Return the target of a link; nothing where there is none."""
    try:
        return os.readlink(os.fsencode(link))
    except OSError:
        return b""
