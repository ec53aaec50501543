"""Writes the stacks of a launcher's ranks to their log, when they do not answer."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from lorad.protocol.heartbeat import DUMP

_DUMP_SECONDS = 10.0  # for the stacks of one rank
_ASKED_SECONDS = 0.2  # for a rank to write them itself


def dump(launcher: int, log: Path) -> None:
    """Write the stacks of every rank to the log. Blocks.

    py-spy, where installed, also shows a stopped process; the ranks write theirs themselves too.
    """
    program = spy()
    ranks: dict[int, int] = {}  # their pids
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                ranks[int(child.environ()["RANK"])] = child.pid
    with open(log, "ab") as file:
        for rank, pid in ranks.items():
            state = "gone"
            with contextlib.suppress(psutil.Error):
                state = psutil.Process(pid).status()  # as the kernel names it: sleeping, stopped, …
            file.write(f"stacks of rank {rank} (pid {pid}, {state}):\n".encode())
            file.flush()
            is_dumped = False
            if program is not None:  # which does not stop it, since it might never resume
                command = [program, "dump", "--nonblocking", "--pid", str(pid)]
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    done = subprocess.run(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        timeout=_DUMP_SECONDS,
                        check=False,
                    )
                    is_dumped = done.returncode == 0
            if not is_dumped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, DUMP)
                time.sleep(_ASKED_SECONDS)


def spy() -> str | None:
    """Return the path of py-spy, beside this interpreter or in PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")
