"""The process of an attempt: SIGTERM asks for a graceful stop, and the journal gets its end."""

import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorad.box.paths import AttemptDir, RunDir
from lorad.errors import AttestationFailed, LoradError, PoolLost, StorageError
from lorad.protocol.driver_params import DriverParams, read_params
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import EndFact, JournalWriter
from lorad.protocol.structs import learn_structs
from lorad.spec.model import Spec
from lorad.spec.text import from_json

_JOURNAL_LOST = 74  # EX_IOERR


@dataclass
class StopFlag:
    """Set by SIGTERM: a graceful stop is wanted."""

    wanted: bool = False

    def __call__(self, *_: object) -> None:
        self.wanted = True


_Work = Callable[[DriverParams, RunDir, JournalWriter, StopFlag], tuple[EndFact, int]]
"""Drives an attempt; returns why it ended, and the last step that counts."""


def run_attempt(attempt_dir: Path, work: _Work) -> int:
    """Do an attempt in this process and return its exit code.

    It is 0 where the attempt completed or was stopped, 1 where it failed, and 74 without a journal to say so.
    """
    stop = StopFlag()
    signal.signal(signal.SIGTERM, stop)
    HEART.start(AttemptDir(attempt_dir).heartbeat)
    learn_structs()
    params = read_params(attempt_dir)
    try:
        run_dir = RunDir(Path(params.run_dir))
        with JournalWriter(run_dir.journal, params.run, params.attempt) as journal:
            end, step = work(params, run_dir, journal, stop)
            HEART.work("end")
            journal.append("end", step, end)
    except OSError as error:
        print(f"the journal cannot be written: {error}", file=sys.stderr, flush=True)
        return _JOURNAL_LOST
    print(f"{end.reason}: {end.detail}", flush=True)
    return 0 if end.reason in ("completed", "stopped") else 1


def end_by(error: Exception, journal: JournalWriter, run_dir: RunDir) -> EndFact:
    """Return how an exception ends the run."""
    resume = f"`lorad resume {journal.run}` continues from a checkpoint."
    try:
        journal.check_place()
    except StorageError as moved:  # the run's directory: anything may fail then
        error = moved
    except OSError:
        pass
    match error:
        case AttestationFailed():
            return EndFact("attestation_failed", error.message, error.hint)
        case PoolLost():
            return EndFact("lost", error.message, error.hint or resume)
        case LoradError():
            return EndFact("failed", error.message, error.hint)
        case OSError():
            where = error.filename or run_dir.root
            return EndFact(
                "failed", f"{where}: {error.strerror}", f"Free space or mend the permissions. {resume}"
            )
        case _:
            traceback.print_exception(error)
            return EndFact("failed", f"{type(error).__name__}: {error}", f"See `lorad logs {journal.run}`.")


def load_spec(run_dir: RunDir, params: DriverParams) -> Spec:
    """Load the spec of the attempt: a resume may have changed what does not define the adapter."""
    path = Path(params.spec) if params.spec else run_dir.spec
    return from_json(path.read_bytes())
