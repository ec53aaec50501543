"""Detects ranks that hang, when one has no heartbeat for too long; their stacks go to the log before they
end.

A rank that waits for another in vain has a heartbeat: what it waits for has time-outs of torch's own, and the
heartbeat of the pool shows that there is no progress.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil

from lorad.protocol.heartbeat import HEART, read_beat
from lorad.trainers.ranks.config import DUMP, beat_file

_DUMP_SECONDS = 10.0  # for the stacks of one rank
_ASKED_SECONDS = 0.2  # for a rank to write them itself
_LOOKS = 8  # within the time after which a rank counts as hung
MOST_SECONDS = 5.0  # between two looks


class Beats:
    """The heartbeats of all ranks, seen when their files' times change; a rank is watched from its first beat
    on.
    """

    def __init__(self, config: Path, ranks: int) -> None:
        self._files = {rank: beat_file(config, rank) for rank in range(ranks)}
        self._times: dict[int, int] = {}
        self._seen: dict[int, float] = {}
        self._progress: dict[int, int] = {}

    def look(self, now: float) -> dict[int, float]:
        """Return the seconds since the heartbeat of each rank."""
        for rank, path in self._files.items():
            try:
                there = path.stat()
            except FileNotFoundError:  # by a logout, which takes XDG_RUNTIME_DIR with it
                self._seen.pop(rank, None)
                continue
            if there.st_size and there.st_mtime_ns != self._times.get(rank):  # empty: on a disk that was full
                self._times[rank], self._seen[rank] = there.st_mtime_ns, now
        return {rank: now - seen for rank, seen in self._seen.items()}

    def forgive(self, now: float) -> None:
        """Nobody looked for a while: who had no heartbeat meanwhile may have been stopped with us."""
        self._seen = dict.fromkeys(self._seen, now)

    def got_on(self) -> bool:
        """Return whether any rank has, since this was asked last."""
        now = {rank: beat.progress for rank, path in self._files.items() if (beat := read_beat(path))}
        before, self._progress = self._progress, now
        return now != before


async def hung(config: Path, ranks: int, limit: float) -> str:
    """Wait until the ranks hang; returns a description. limit: seconds. Progress of any rank is progress of
    the pool.
    """
    beats, pause = Beats(config, ranks), min(limit / _LOOKS, MOST_SECONDS)
    looked = time.monotonic()
    while True:
        await asyncio.sleep(pause)
        now = time.monotonic()
        silent = beats.look(now)
        if now - looked > limit / 2:
            beats.forgive(now)
        elif late := {rank: seconds for rank, seconds in silent.items() if seconds > limit}:
            return ", ".join(
                f"rank {rank} was hung: no heartbeat for {late[rank]:.0f} s" for rank in sorted(late)
            )
        looked = now
        if beats.got_on():
            HEART.progress()


def dump(launcher: int, log: Path) -> None:
    """Write the stacks of every rank to the log. Blocks.

    py-spy, where installed, also shows a stopped process; the ranks write theirs themselves too.
    """
    program = spy()
    with open(log, "ab") as file:
        for rank, pid in _pids(launcher).items():
            file.write(f"stacks of rank {rank} (pid {pid}, {_state(pid)}):\n".encode())
            file.flush()
            if program is None or not _spied(program, pid, file):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, DUMP)
                time.sleep(_ASKED_SECONDS)


def _pids(launcher: int) -> Mapping[int, int]:
    """Map rank to pid."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                found[int(child.environ()["RANK"])] = child.pid
    return found


def spy() -> str | None:
    """py-spy beside this interpreter, or in PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _state(pid: int) -> str:
    """Return the state of a process as the kernel names it: sleeping, stopped, disk-sleep, …"""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _spied(program: str, pid: int, file: IO[bytes]) -> bool:
    """Dump a process's stacks by py-spy, without stopping it, since it might never resume; returns whether
    that worked.
    """
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, timeout=_DUMP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
