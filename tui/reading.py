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
        if reset := life != self._life:
            self._life, self._step, self._offset = life, 0, -LOG_TAIL
        steps = client.steps(self.name, after=self._step, limit=PAGE)
        self._step = steps[-1]["step"] if steps else self._step
        self._more = len(steps) == PAGE
        evals = client.evals(self.name) if reset or changes.touch(self.name, "eval") else None
        kept = client.checkpoints(self.name) if reset or changes.touch(self.name, "checkpoint") else None
        return RunNews(run, reset, steps, evals, kept, self._log(client), self._more)

    def _log(self, client: Client) -> str:
        part = client.logs(self.name, offset=self._offset)
        if part["size"] < self._offset:  # another file
            part = client.logs(self.name, offset=-LOG_TAIL)
        self._offset = part["offset"]
        return str(part["text"])
