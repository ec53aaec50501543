"""Write the stacks of a hung process and of its descendants into its log, where py-spy is installed."""

import contextlib
import os
import subprocess
import time

import psutil

from lorad.box.paths import AttemptDir
from lorad.children.stacks import spy
from lorad.daemon.process.processes import read_status

_DUMP_SECONDS = 5.0
_ALL_SECONDS = 15.0
_MOST = 16  # processes
_BYTES = 1 << 16  # kept of one dump


def dump_stacks(attempt: AttemptDir) -> None:
    """Append the stacks to the log of the process. It takes _ALL_SECONDS at most.

    py-spy does not stop the processes, as they may be stopped already; without py-spy nothing happens.
    """
    spy_path = spy()
    status = read_status(attempt)
    if spy_path is None or status is None or status["pid"] is None:
        return
    family: list[tuple[int, str]] = []  # with descendants in other sessions
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(status["pid"])
        processes = [first, *first.children(recursive=True)][:_MOST]
        family = [(process.pid, process.name()) for process in processes]
    deadline = time.monotonic() + _ALL_SECONDS
    with open(attempt.log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as log:
        for pid, name in family:
            left = min(_DUMP_SECONDS, deadline - time.monotonic())
            command = [spy_path, "dump", "--nonblocking", "--pid", str(pid)]
            stacks = b"no time is left for these\n"
            try:
                if left > 0:
                    quiet = subprocess.DEVNULL
                    done = subprocess.run(command, stdin=quiet, capture_output=True, timeout=left, cwd="/")
                    first_line = b"".join(done.stderr.splitlines(keepends=True)[:1])
                    stacks = done.stdout[:_BYTES] if done.returncode == 0 else first_line
            except subprocess.TimeoutExpired:
                stacks = b"py-spy took too long\n"
            except OSError as error:
                stacks = f"py-spy: {error.strerror}\n".encode()
            log.write(f"[lorad] stacks of pid {pid} ({name}), which hangs:\n".encode() + stacks)
            log.flush()
