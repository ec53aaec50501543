"""Writes figures to one place, in a thread of its own: a server that hangs delays no other.

Failures are tried again with growing pauses; no run notices.
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
from lorad.errors import LoradError
from lorad.loggers.choose import LoggerChoice, make
from lorad.loggers.cursor import CursorFile
from lorad.loggers.follow import Follower
from lorad.loggers.logger import LoggedRun
from lorad.loggers.table import Fault, FollowedRun
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import read
from lorad.protocol.tables import LONGEST

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_FIRST_PAUSE = 1.0  # seconds before a logger that failed is tried again
_LONGEST_PAUSE = 300.0


class _RunProgress(Struct):
    """How far a run's journal is written."""

    follower: Follower | None = None
    size: int = -1  # of the journal in bytes, when all of it was written
    is_over: bool = False
    pause: float = 0.0  # seconds from a fault to the next try
    not_before: float = 0.0
    fault: Fault | None = None


class Sink:
    """Brings all runs of one choice up to date, in one thread."""

    def __init__(self, choice: LoggerChoice, files: Path) -> None:
        self._choice = choice
        self._files = files
        self._runs: dict[str, FollowedRun] = {}
        self._progress: dict[str, _RunProgress] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=choice.id, daemon=True)
        self._thread.start()

    def follow(self, runs: Iterable[FollowedRun]) -> None:
        """Follow these runs from now on, and no others."""
        self._runs = {run.run: run for run in runs}

    def stop(self) -> None:
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @property
    def faults(self) -> list[Fault]:
        runs = self._runs
        progress = list(self._progress.items())
        return [each.fault for name, each in progress if each.fault and name in runs]

    def is_done(self, run: FollowedRun) -> bool:
        """Return whether a run that is over is written as a whole."""
        progress = self._progress.get(run.run)
        if progress is None or progress.fault is not None:
            return False
        return progress.is_over and progress.size == _size(run)

    def _work(self) -> None:
        while True:
            stopping = self._stop.is_set()
            runs = self._runs
            for run in runs.values():
                HEART.work(f"{self._choice.name} of {run.run}")
                self._bring_up_to_date(run, self._progress.setdefault(run.run, _RunProgress()))
            HEART.work("")
            for name in list(self._progress):
                if stopping or name not in runs:
                    self._drop(self._progress[name])
                    self._progress.pop(name)
            if stopping:
                return
            self._stop.wait(_POLL_SECONDS)

    def _bring_up_to_date(self, run: FollowedRun, progress: _RunProgress) -> None:
        """Write what is new, unless the journal has no record yet, or a fault is too recent."""
        size = _size(run)
        is_same = (size, run.is_over) == (progress.size, progress.is_over)
        if time.monotonic() < progress.not_before or is_same:
            return
        try:
            if progress.follower is None:
                directory = RunDir(Path(run.directory))
                logged = logged_run(directory, self._files)
                if logged is not None:
                    file = CursorFile(directory.loggers / f"{self._choice.id}.json")
                    make_logger = partial(make, self._choice, logged)
                    progress.follower = Follower(directory.journal, make_logger, file)
            if progress.follower is not None:
                progress.follower.catch_up(is_over=run.is_over)
        except Exception as error:  # of a library, a network, a disk
            progress.pause = min(2 * progress.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            progress.not_before = time.monotonic() + progress.pause
            hint = error.hint if isinstance(error, LoradError) else ""
            says = ": ".join([type(error).__name__, *filter(str.strip, str(error).splitlines())][:2])
            if isinstance(error, LoradError):
                says = error.message
            elif isinstance(error, OSError) and error.strerror:
                says = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            # MLflow quotes the whole answer of its server
            fault = Fault(run.run, self._choice.name, says[:LONGEST], hint)
            if progress.fault != fault:
                progress.fault = fault
                log.error("%s of %s: %s", self._choice.name, run.run, fault.says)
            self._drop(progress)
        else:
            if progress.fault is not None:
                log.info("%s of %s: written again", self._choice.name, run.run)
            progress.size = size
            progress.is_over = run.is_over
            progress.pause = 0.0
            progress.fault = None

    def _drop(self, progress: _RunProgress) -> None:
        if progress.follower is not None:
            progress.follower.drop()
            progress.follower = None


def logged_run(directory: RunDir, files: Path) -> LoggedRun | None:
    """Describe a run by its files, by its first name; return None while the journal has no record.

    The spec is that of the newest attempt that has one here; {} where none can be read.
    """
    first = next(read(directory.journal), None)
    if first is None:
        return None
    spec: dict[str, Any] = {}
    attempts = sorted(directory.root.glob("attempts/*"), reverse=True)
    for path in (path for each in attempts for path in (each / "work" / "spec.json", each / "spec.json")):
        try:
            spec = dict(json.loads(path.read_bytes()))
            break
        except (OSError, ValueError, TypeError):
            continue
    return LoggedRun(first[0].run, first[0].at, files, spec)


def _size(run: FollowedRun) -> int:
    try:
        return RunDir(Path(run.directory)).journal.stat().st_size
    except OSError:
        return 0
