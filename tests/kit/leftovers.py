"""Processes that outlive what started them: found by the LORAD_HOME that they serve, and killed."""

import contextlib
import os
import time
from pathlib import Path

import psutil


def kill_leftovers(home: Path) -> None:
    """Kills every process of `home` until none runs. Exit statuses are left to their parents."""
    while leftovers := [process for process in psutil.process_iter() if serves(process, home)]:
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def serves(process: psutil.Process, home: Path) -> bool:
    """Whether environment, command line or log name `home`; never true of this process.

    A process that gives itself a title writes over the first two, of which psutil then sees nothing.
    """
    if process.pid == os.getpid():
        return False
    with contextlib.suppress(psutil.Error, OSError):
        place = Path(f"/proc/{process.pid}")
        environment = (place / "environ").read_bytes().split(b"\0")
        said = [*process.cmdline(), *(target(place / "fd" / fd) for fd in ("1", "2"))]
        named = f"LORAD_HOME={home}".encode() in environment or any(str(home) in text for text in said)
        return named and process.status() != psutil.STATUS_ZOMBIE
    return False


def target(link: Path) -> str:
    """Return the target of a link; "" where there is none."""
    try:
        return os.readlink(link)
    except OSError:
        return ""
