"""One place that figures are written to, and its thread: a server that hangs holds up no other.

A fault is kept, and tried again later and later; no run notices.
"""

import json
import logging
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.box.paths import RunDir
from lorad.box.tables import LONGEST
from lorad.errors import LoradError
from lorad.loggers.choose import Choice, make
from lorad.loggers.cursor import CursorFile
from lorad.loggers.follow import Follower
from lorad.loggers.logger import LoggedRun
from lorad.loggers.table import Fault, Followed
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import read

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0  # seconds before a logger that failed is tried again


class _JournalSeen(Struct):
    """What is known of one run's journal.

    size: of the journal when all of it was written; -1 before.
    pause: seconds until the next try after a fault; 0 without one.
    """

    follower: Follower | None = None
    size: int = -1
    is_over: bool = False
    pause: float = 0.0
    not_before: float = 0.0
    fault: Fault | None = None


class Sink:
    """Brings all runs of one choice up to date, in one thread."""

    def __init__(self, choice: Choice, files: Path) -> None:
        self._choice, self._files = choice, files
        self._wanted: dict[str, Followed] = {}
        self._seen: dict[str, _JournalSeen] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=choice.id, daemon=True)
        self._thread.start()

    def want(self, runs: Iterable[Followed]) -> None:
        """Follow these runs from now on, and no others."""
        self._wanted = {run.run: run for run in runs}

    def stop(self) -> None:
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @property
    def faults(self) -> list[Fault]:
        wanted = self._wanted
        return [seen.fault for name, seen in list(self._seen.items()) if seen.fault and name in wanted]

    def is_done(self, run: Followed) -> bool:
        """Check whether a run that is over is written as a whole."""
        seen = self._seen.get(run.run)
        return seen is not None and seen.fault is None and seen.is_over and seen.size == _size(run)

    def _work(self) -> None:
        while True:
            stopping, wanted = self._stop.is_set(), self._wanted
            for run in wanted.values():
                HEART.work(f"{self._choice.name} of {run.run}")
                self._bring_up_to_date(run, self._seen.setdefault(run.run, _JournalSeen()))
            HEART.work("")
            for name in list(self._seen):
                if stopping or name not in wanted:
                    self._drop(self._seen[name])
                    self._seen.pop(name)
            if stopping:
                return
            self._stop.wait(_POLL_SECONDS)

    def _bring_up_to_date(self, run: Followed, seen: _JournalSeen) -> None:
        size = _size(run)
        if time.monotonic() < seen.not_before or (size, run.is_over) == (seen.size, seen.is_over):
            return
        try:
            seen.follower = seen.follower or self._follower(run)
            if seen.follower is not None:
                seen.follower.catch_up(is_over=run.is_over)
        except Exception as error:  # of a library, a network, a disk
            seen.pause = min(2 * seen.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            seen.not_before = time.monotonic() + seen.pause
            hint = error.hint if isinstance(error, LoradError) else ""
            says = _in_words(error)[:LONGEST]  # MLflow quotes the whole answer of its server
            before, seen.fault = seen.fault, Fault(run.run, self._choice.name, says, hint)
            if before != seen.fault:
                log.error("%s of %s: %s", self._choice.name, run.run, seen.fault.says)
            self._drop(seen)
        else:
            if seen.fault is not None:
                log.info("%s of %s: written again", self._choice.name, run.run)
            seen.size, seen.is_over, seen.pause, seen.fault = size, run.is_over, 0.0, None

    def _drop(self, seen: _JournalSeen) -> None:
        if seen.follower is not None:
            seen.follower.drop()
            seen.follower = None

    def _follower(self, run: Followed) -> Follower | None:
        """Make the follower of a run; None while its journal has no record."""
        directory = RunDir(Path(run.directory))
        logged = logged_run(directory, self._files)
        if logged is None:
            return None
        file = CursorFile(directory.loggers / f"{self._choice.id}.json")
        return Follower(directory.journal, partial(make, self._choice, logged), file)


def logged_run(directory: RunDir, files: Path) -> LoggedRun | None:
    """Describe a run by its own files, under the name that it began with, whatever it is named since; None
    while its journal has no record.
    """
    first = next(read(directory.journal), None)
    return None if first is None else LoggedRun(first[0].run, first[0].at, files, _spec_of(directory))


def _spec_of(directory: RunDir) -> dict[str, Any]:
    """Read the spec of the newest attempt that has one here; {} where none can be read."""
    for attempt in sorted(directory.root.glob("attempts/*"), reverse=True):
        for path in (attempt / "work" / "spec.json", attempt / "spec.json"):
            try:
                return dict(json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError):
                continue
    return {}


def _size(run: Followed) -> int:
    try:
        return RunDir(Path(run.directory)).journal.stat().st_size
    except OSError:
        return 0


def _in_words(error: Exception) -> str:
    if isinstance(error, LoradError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
