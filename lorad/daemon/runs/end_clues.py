"""Find out how a process ended from what is left of it: its status, its logs, the kernel's log."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorad.box.paths import AttemptDir
from lorad.children.identity import boot_id
from lorad.daemon.process.causes import KILLED_FOR_MEMORY, MAYBE_KILLED_FOR_MEMORY, Clues, diagnose
from lorad.daemon.process.log_trim import logs_of, open_log
from lorad.daemon.process.processes import ProcessState, read_status

_LOG_BYTES = 1 << 16  # read of each log
_LOGS = 24  # logs read of one attempt: the process itself, servers and ranks
_KERNEL_RECORDS = 20_000  # read of the kernel's log
_KERNEL_SECONDS = 0.1  # for reading it
_KILLED = "Killed process"
_XID = "NVRM: Xid"
_XID_SECONDS = 60.0  # before an end; earlier ones were survived, or came from others
_SLACK_SECONDS = 2.0


def in_words(attempt: AttemptDir, process: ProcessState, name: str) -> str:
    """Say how `name` ended, why as far as that is known, and what to do about it."""
    if forced := by_force(attempt, process):
        return forced
    if process.exit_code == 0:
        return f"{name} {process.in_words()}"
    status = read_status(attempt) or {}
    before = status.get("oom_before")
    after = status.get("oom_after")
    ooms = None if before is None or after is None else after - before
    ends = []
    for path in logs_of(attempt)[:_LOGS]:
        if (fd := open_log(path, os.O_RDONLY)) is not None:
            with os.fdopen(fd, "rb") as file:
                file.seek(max(0, os.fstat(fd).st_size - _LOG_BYTES))
                ends.append(file.read(_LOG_BYTES).decode(errors="replace"))
    kernel = list(_kernel_lines(status)) if status.get("started_at") else []
    log = "\n".join(ends)
    diagnosis = diagnose(Clues(process.pid, process.exit_code, process.signal, log, kernel, ooms))
    if diagnosis is None:
        return f"{name} {process.in_words()}"
    if diagnosis in (KILLED_FOR_MEMORY, MAYBE_KILLED_FOR_MEMORY):
        return f"{name} was {diagnosis.what}. {diagnosis.advice}"
    return f"{name} {process.in_words()}: {diagnosis.what}. {diagnosis.advice}"


def by_force(attempt: AttemptDir, process: ProcessState) -> str:
    """Say whether the daemon killed the process as it hung, or the machine was restarted; "" if neither."""
    may_be_killed = process.exit_code is None and process.signal in (None, signal.SIGKILL)
    if may_be_killed and (why := killed_for(attempt)):
        return why
    if was_restarted(attempt):
        lines = Path("/proc/stat").read_text().splitlines()
        booted_at = float(next((line.split()[1] for line in lines if line.startswith("btime")), 0))
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(booted_at))
        return f"the machine was restarted, at {at}"
    return ""


def was_restarted(attempt: AttemptDir) -> bool:
    """Check whether the machine went down under the process, which began in another boot and has no end."""
    status = read_status(attempt)
    if not status or status["ended_at"] is not None:
        return False
    return status["boot_id"] not in ("", boot_id())


def _kernel_lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield what the kernel logged about memory and GPUs in the life of a process, where that may be read."""
    now = time.time()
    clock = time.monotonic()
    since, until = (when - now + clock for when in (status["started_at"], status["ended_at"] or now))
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    begun = time.monotonic()
    try:
        for _ in range(_KERNEL_RECORDS):
            if time.monotonic() - begun > _KERNEL_SECONDS:
                return
            about, _, text = os.read(fd, 8192).decode(errors="replace").partition(";")
            at = int(about.split(",")[2]) / 1e6
            begin = since if _KILLED in text else max(since, until - _XID_SECONDS) if _XID in text else until
            if begin - _SLACK_SECONDS <= at <= until + _SLACK_SECONDS and (_KILLED in text or _XID in text):
                yield text.splitlines()[0]
    except (OSError, ValueError, IndexError):  # EAGAIN: that was all
        return
    finally:
        os.close(fd)


def killed_for(attempt: AttemptDir) -> str:
    """Say why the daemon killed the process, or was about to; "" when it did not."""
    try:
        return str(json.loads(attempt.killed.read_bytes())["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
