"""Processes that outlive what started them: found by the LORAD_HOME that they serve, and killed."""

from __future__ import annotations

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
    """Whether its environment or its command line names `home`; never true of this process."""
    if process.pid == os.getpid():
        return False
    with contextlib.suppress(psutil.Error, OSError):
        named = process.environ().get("LORAD_HOME") == str(home) or str(home) in " ".join(process.cmdline())
        return named and process.status() != psutil.STATUS_ZOMBIE
    return False
