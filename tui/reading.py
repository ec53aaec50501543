"""What the run screen needs, read so that each fact crosses the socket once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lorad.client import Client
from lorad.tui.feed import Changes

Json = dict[str, Any]
PAGE = 5000  # steps in one answer
LOG_TAIL = 32768  # bytes of log at the beginning


@dataclass
class RunNews:
    """`reset`: forget steps and log, this is another attempt. `evals`, `checkpoints`: None when unchanged.
    `more`: there are further steps to read."""

    run: Json
    reset: bool
    steps: list[Json]
    evals: list[Json] | None
    checkpoints: list[Json] | None
    log: str
    more: bool


class RunReader:
    """Remembers how far it read. Used by one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._life: tuple[Any, ...] = ()
        self._step, self._offset, self._more = 0, -LOG_TAIL, False

    def read(self, client: Client, changes: Changes) -> RunNews | None:
        """None when nothing happened to the run. A resume rewinds: then everything is read anew."""
        if not (changes.touch(self.name) or self._more):
            return None
        run = client.show(self.name)
        life = (run.get("created_at"), run.get("attempt"))
        reset = life != self._life
        steps = client.steps(self.name, after=0 if reset else self._step, limit=PAGE)
        evals = client.evals(self.name) if reset or changes.touch(self.name, "eval") else None
        kept = client.checkpoints(self.name) if reset or changes.touch(self.name, "checkpoint") else None
        log = self._log(client, -LOG_TAIL if reset else self._offset)
        self._life, self._more, self._offset = life, len(steps) == PAGE, log["offset"]
        self._step = steps[-1]["step"] if steps else 0 if reset else self._step
        return RunNews(run, reset, steps, evals, kept, str(log["text"]), self._more)

    def _log(self, client: Client, offset: int) -> Json:
        part = client.logs(self.name, offset=offset)
        return part if part["size"] >= offset else client.logs(self.name, offset=-LOG_TAIL)  # else: another file
