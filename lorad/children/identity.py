"""Tells processes apart of which one got the pid of another.

Everything that names a process in a file, or signals one that it did not start itself, goes by `Identity`.
`guard.read_stat` asks the kernel, as the guard runs without the rest of lorad.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lorad.children import guard

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OVER = (b"Z", b"X")  # states of a process that has ended: a zombie, or one that even its parent has let go
# places in what `guard.read_stat` returns
_STATE = 0
_SESSION = 3
_FLAGS = 6
_START = 19


class Identity(NamedTuple):
    """One process, and no later one with its pid.

    boot: The boot of this machine in which it began, by the kernel's id; pids begin again with each.
    pid: Its number, which the kernel gives to another process once it is gone.
    start: Clock ticks from that boot to its start, in which two processes with one pid differ.
    """

    boot: str
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Identity":
        """Return the identity of the process with this pid, maybe a zombie. Raises ProcessLookupError."""
        stat = stat_of(pid)
        if stat is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(boot_id(), pid, stat.start)

    @property
    def is_alive(self) -> bool:
        """Return whether it runs; a zombie does not."""
        return start_time(self.pid) == self.start and self.boot == boot_id()

    def signal(self, number: int) -> bool:
        """Send it a signal; return False when it is gone. Raises OSError where that is not allowed."""
        try:
            with opened(self.pid) as pidfd:
                if not self.is_alive:
                    return False
                signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        return True


class _Stat(NamedTuple):
    """What lorad asks the kernel about a process, see proc_pid_stat(5).

    is_over: Whether it has ended, and is a zombie until its parent asks how.
    session: The pid of the process that began its session.
    flags: The kernel's flags PF_*.
    start: Clock ticks from the boot of the machine to its start.
    """

    is_over: bool
    session: int
    flags: int
    start: int


def stat_of(pid: int) -> _Stat | None:
    """Ask the kernel about a process; None when there is none with this pid."""
    fields = guard.read_stat(pid)
    if not fields:
        return None
    return _Stat(
        is_over=fields[_STATE] in _OVER,
        session=int(fields[_SESSION]),
        flags=int(fields[_FLAGS]),
        start=int(fields[_START]),
    )


def start_time(pid: int) -> int | None:
    """Return the clock ticks from boot to a process's start; None when it is gone, or a zombie."""
    stat = stat_of(pid)
    return None if stat is None or stat.is_over else stat.start


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot of the machine."""
    return _BOOT_ID.read_text().strip()


def pids() -> list[int]:
    """List the pids of all processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


@contextlib.contextmanager
def opened(pid: int) -> Iterator[int]:
    """Hold a pidfd of a process within the block. Raises ProcessLookupError."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
