"""What a lane knows: the requests that came, the results that were written, and the state to resume from."""

import time
from pathlib import Path

from msgspec import Struct

from lorad.tinker.log import START, LogWriter, first_seqs, may_have_more, pause, read
from lorad.tinker.records import Failed, Published, Request, Result, Saved, Snapshot, Waiting

REQUESTS = "tinker/requests"  # below the run's directory
RESULTS = "tinker/results"
WEIGHTS = "tinker/weights"
_KEPT = 3600.0  # seconds for which a result that nothing else needs is kept for its client
_DISORDER = 1024  # by how many places a request may come late


class State(Struct):
    """What a resume restores.

    Attributes:
        step: How many optimizer steps are done.
        seq: The last request that the weights contain.
        version: The newest published version; -1 before the first.
        position: How many datums were trained on.
    """

    step: int = 0
    seq: int = -1
    version: int = -1
    position: int = 0


class Inbox:
    """Returns the requests in the order of `seq`, each once, however they come."""

    def __init__(self, directory: Path, after: int) -> None:
        self._directory = directory
        self._next = after + 1
        self._position = START
        self._waiting: dict[int, Request] = {}
        self._idle_since: float | None = None

    def next(self) -> Request | None:
        """Take the request whose turn it is; None where it has not come, after a wait that grows.

        Raises IntegrityError, OSError.
        """
        self._look()
        request = self._waiting.pop(self._next, None)
        if request is not None:
            self._next += 1
            self._idle_since = None
            return request
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        time.sleep(pause(now - self._idle_since))
        return None

    def has_next(self) -> bool:
        """Return whether the request whose turn it is has come."""
        self._look()
        return self._next in self._waiting

    def _look(self) -> None:
        """Read on as far as the request whose turn it is; the requests behind it stay on disk."""
        if self._next in self._waiting or not may_have_more(self._directory, self._position):
            return
        for request, behind in read(self._directory, Request, self._position):
            self._position = behind
            if request.seq >= self._next:
                self._waiting.setdefault(request.seq, request)
            if request.seq == self._next:
                return


class EarlierResults(Struct, frozen=True):
    """The results, written by earlier attempts, of requests that the checkpoint does not contain.

    Attributes:
        failed: Whether the request failed, by seq.
        snapshot: The last seq of a snapshot, -1 for none; requests up to it may be gone.
    """

    failed: dict[int, bool] = {}
    snapshot: int = -1

    @classmethod
    def read(cls, directory: Path, after: int) -> "EarlierResults":
        """Read the results behind the last request that the checkpoint contains."""
        failed: dict[int, bool] = {}
        snapshot = -1
        for result, _ in read(directory, Result, after=after):
            if isinstance(result.outcome, Snapshot):
                snapshot = max(snapshot, result.seq)
            elif not isinstance(result.outcome, Waiting):
                failed.setdefault(result.seq, isinstance(result.outcome, Failed))
        return cls(failed, snapshot)


def shorten(results: LogWriter, root: Path, seq: int) -> None:
    """Drop old results of requests that a checkpoint contains and that nobody can do again.

    A result that names files stays as long as the files.

    Args:
        root: The run's directory.
        seq: The last request in the newest checkpoint.
    """

    def names_files(result: Result) -> bool:
        outcome = result.outcome
        return isinstance(outcome, Saved | Published) and (root / outcome.directory).is_dir()

    oldest = min(first_seqs(root / REQUESTS, _DISORDER), default=seq + 1)
    results.drop(min(oldest, seq + 1), Result, names_files, age=_KEPT)
