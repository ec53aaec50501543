"""What befalls the episodes of an environment, by their rows, once `count` of them have begun."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

FAULTS = {
    "kills": lambda: os.kill(os.getpid(), 9),
    "blocks": lambda: time.sleep(600),
    "waits": int,
}


class Trouble:
    """Notes each episode that begins in the file `noted`: process, its CPU seconds, and row.

    Once `held` have begun, one waits for ever, and leaves the number of its process beside `noted`.
    """

    def __init__(self, noted, count, held=0):
        self.noted, self.count, self.held = Path(noted), count, held

    def begin(self, row):
        with self.noted.open("a") as lines:
            lines.write(f"{os.getpid()} {time.process_time()} {row}\n")

    async def befall(self, row):
        if self.is_held():
            await asyncio.sleep(600)
        while self.begun() < self.count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        FAULTS.get(row.split()[0], int)()
        if row.startswith("waits"):
            await asyncio.sleep(600)

    def begun(self):
        return self.noted.read_bytes().count(b"\n")

    def is_held(self):
        if not 0 < self.held <= self.begun():
            return False
        with contextlib.suppress(FileExistsError):
            Path(f"{self.noted}.waits").symlink_to(str(os.getpid()))
            return True
        return False


def rows(count, faults):
    """One row for each of `faults`, and more of episodes that answer, by the words that `befall` reads."""
    return [f"{name} {n}" for n, name in enumerate([*faults, *["answers"] * (count + 9)])]
