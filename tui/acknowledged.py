"""Remembers of which runs that ended the alarms were acknowledged, of all boxes in one file of the user's."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from lorad.client.boxes.hosts import HERE
from lorad.errors import NotAllowed
from lorad.records.runs import Run
from lorad.tui.state_files import read_state, state_file, write_state

_KEPT = 48 * 3600.0  # seconds after a run's end: no alarm of it is older


class Acknowledged:
    """Knows the ends that were acknowledged. One thread adds while others read."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or state_file("acknowledged.json")
        self._ended = self._read()  # by box, run and end, when it ended

    def alarming(self, runs: Iterable[Run], box: str) -> list[Run]:
        """List the runs of a box whose alarms are shown: all but those that ended and were acknowledged."""
        return [run for run in runs if run.state != "ended" or _key(run, box) not in self._ended]

    def add(self, runs: Iterable[Run], box: str) -> None:
        """Acknowledge the ends of runs of a box.

        Raises NotAllowed where the file cannot be written; then it holds until the end of this session.
        """
        added = {_key(run, box): float(run.ended_at or time.time()) for run in runs}
        self._ended = {**self._read(), **self._ended, **added}
        try:
            write_state(self._path, {key: at for key, at in self._ended.items() if time.time() - at < _KEPT})
        except OSError as error:
            raise NotAllowed(
                f"Acknowledged until this session ends: {self._path}: {error.strerror}.",
                hint="XDG_STATE_HOME names another directory.",
            ) from error

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(OSError, ValueError):
            return read_state(self._path, dict[str, float])
        return {}


def _key(run: Run, box: str) -> str:
    """Name a run and its end: a run that is resumed and ends again has other alarms.

    Runs of this machine have no box before their name, as all had when there was one box: files of that time
    are read.
    """
    return f"{run.name} {run.ended_at}" if box == HERE else f"{box}/{run.name} {run.ended_at}"
