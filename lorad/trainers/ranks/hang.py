"""Detects ranks that hang, when one has no heartbeat for too long.

A rank that waits for another in vain has a heartbeat: what it waits for has time-outs of torch's own, and the
heartbeat of the pool shows that there is no progress.
"""

import asyncio
import time
from pathlib import Path

from lorad.protocol.heartbeat import HEART, read_beat
from lorad.trainers.ranks.config import beat_file

_LOOKS = 8  # within the time after which a rank counts as hung
MOST_SECONDS = 5.0  # between two looks


class Beats:
    """The heartbeats of all ranks, each of which changes its file's time. A rank counts from its first on."""

    def __init__(self, config: Path, ranks: int) -> None:
        self._files = {rank: beat_file(config, rank) for rank in range(ranks)}
        self._times: dict[int, int] = {}
        self._seen: dict[int, float] = {}
        self._progress: dict[int, int] = {}

    def look(self, now: float) -> dict[int, float]:
        """Return the seconds since each rank's last heartbeat."""
        for rank, path in self._files.items():
            try:
                status = path.stat()
            except FileNotFoundError:  # by a logout, which takes XDG_RUNTIME_DIR with it
                self._seen.pop(rank, None)
                continue
            # it is empty on a disk that was full
            if status.st_size and status.st_mtime_ns != self._times.get(rank):
                self._times[rank] = status.st_mtime_ns
                self._seen[rank] = now
        return {rank: now - seen for rank, seen in self._seen.items()}

    def forgive(self, now: float) -> None:
        """Count every rank as seen now: nobody looked for a while, and they may have been stopped with us."""
        self._seen = dict.fromkeys(self._seen, now)

    def has_progress(self) -> bool:
        """Return whether any rank has made progress since the last call."""
        before = self._progress
        self._progress = {
            rank: beat.progress for rank, path in self._files.items() if (beat := read_beat(path))
        }
        return self._progress != before


async def hung(config: Path, ranks: int, limit: float) -> str:
    """Wait until a rank had no heartbeat for `limit` seconds, and describe it.

    Progress of any rank is progress of the pool.
    """
    beats = Beats(config, ranks)
    pause = min(limit / _LOOKS, MOST_SECONDS)
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
        if beats.has_progress():
            HEART.progress()
