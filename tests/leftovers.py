"""Processes that outlive what started them: found by the LORAD_HOME that they serve, and killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil


def kill_leftovers(home: Path) -> None:
    """Kills every process of `home` until there is none, and waits for their end."""
    while leftovers := [process for process in psutil.process_iter() if serves(process, home)]:
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(leftovers, timeout=10)


def serves(process: psutil.Process, home: Path) -> bool:
    """Whether its environment or its command line names `home`; never true of this process."""
    if process.pid == os.getpid():
        return False
    with contextlib.suppress(psutil.Error, OSError):
        named = process.environ().get("LORAD_HOME") == str(home) or str(home) in " ".join(process.cmdline())
        return named and process.status() != psutil.STATUS_ZOMBIE
    return False
