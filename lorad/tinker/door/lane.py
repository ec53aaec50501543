"""A model as the door sees it: a log of requests to append to, and a log of results to follow."""

import asyncio
import contextlib
import errno
import logging
import time
from pathlib import Path

from lorad.errors import LoradError
from lorad.tinker import records
from lorad.tinker.door.errors import HttpError
from lorad.tinker.log import START, LogWriter, Position, follow, read, segments_of

log = logging.getLogger(__name__)

_MOST_AHEAD = 4096  # requests of a model that wait
_GONE = "results are kept for an hour, and longer while they may be needed to continue after a death"
_HOLE_SECONDS = 30.0  # after which a number that did not come is named as the reason for waiting


class LaneClient:
    """Appends requests for one model and follows its results. Only the event loop uses it.

    Asleep, it holds no files and follows nothing; what it knows stays, and `wake` reads on from there.

    Attributes:
        used: When the last request came, in Unix seconds.
        touched: When somebody asked for it last, by time.monotonic().
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.used = 0.0
        self.touched = time.monotonic()
        self._requests = directory / "requests"
        self._results = directory / "results"
        self._log: LogWriter | None = None
        self._behind = START  # the last result that was read
        self._digests: dict[int, str] = {}
        self._sizes: dict[int, int] = {}  # bytes of each request without a result
        self._places: dict[int, Position] = {}  # behind the record before the result of each seq
        self._saved: dict[int, records.Result] = {}
        self._came = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._reason = ""
        self._trouble = ""
        self._snapshot = -1
        self._waits_since = time.monotonic()

    async def wake(self) -> None:
        """Take the log for writing, read what has come, and follow what comes.

        Raises OSError, and LoradError for a damaged log.
        """
        async with self._writing:
            writer = await asyncio.to_thread(LogWriter, self._requests)
            try:
                if self._behind == START:
                    await asyncio.to_thread(self._read_requests)
                for result, position in read(self._results, records.Result, self._behind):
                    self._take(result, self._behind)
                    self._behind = position
                    await asyncio.sleep(0)
                self._forget()
            except BaseException:
                writer.close()
                raise
            self._log = writer
            self._trouble = ""
            self._following = asyncio.create_task(self._follow())

    async def sleep(self) -> None:
        """Let go of the files."""
        async with self._writing:
            if self._following is not None:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)
            if self._log is not None:
                self._log.close()
            self._following = self._log = None

    @property
    def is_asleep(self) -> bool:
        return self._following is None

    @property
    def last(self) -> int:
        """The largest seq that came."""
        return max([*self._digests, *self._places, self._snapshot])

    @property
    def saved(self) -> list[records.Result]:
        """The results that are a checkpoint or a version, oldest first."""
        return [self._saved[seq] for seq in sorted(self._saved)]

    @property
    def waiting(self) -> int:
        """How many requests have no result."""
        return len(self._digests.keys() - self._places.keys())

    @property
    def bytes(self) -> int:
        """How many bytes the requests without a result have in the log."""
        return sum(self._sizes.values())

    def knows(self, seq: int) -> bool:
        return seq in self._digests or seq in self._places or seq <= self._snapshot

    def refuse_other(self, seq: int, digest: str) -> bool:
        """Return whether the request came already. Raises HttpError when another one has its number."""
        earlier = self._digests.get(seq)
        if earlier is not None and earlier != digest:
            # 409 would be repeated for minutes
            raise HttpError(
                400,
                f"request {seq} of this model was another one: does a second process train it? Make a model "
                "for each, with create_training_client_from_state_with_optimizer",
            )
        return self.knows(seq)

    async def submit(self, seq: int, digest: str, arguments: records.Arguments) -> None:
        """Write a request to disk, once. Raises HttpError 400 and 429, OSError."""
        if self.refuse_other(seq, digest):
            return
        if self.waiting >= _MOST_AHEAD:
            raise HttpError(429, f"{self.waiting} requests of this model wait already; ask again later")
        async with self._writing:
            if self.refuse_other(seq, digest):  # the same one came twice at a time
                return
            if self._log is None:
                raise OSError(
                    errno.EAGAIN, "the log of this model was closed; ask again", str(self.directory)
                )
            request = records.Request(seq, time.time(), digest, arguments)
            size = await asyncio.shield(asyncio.to_thread(self._log.append, request))
            self._digests[seq] = digest
            self.used = request.at
            if seq not in self._places:
                self._sizes[seq] = size
            self._waits_since = time.monotonic()

    async def result(self, seq: int, seconds: float) -> records.Outcome | None:
        """Wait so long for the result of a request; return None where it has not come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._came:
                await self._came.wait_for(lambda: seq in self._places or seq <= self._snapshot)
        if seq in self._saved:
            return self._saved[seq].outcome
        if seq in self._places:
            result, _ = next(read(self._results, records.Result, self._places[seq]), (None, None))
            outcome = None if result is None or result.seq != seq else result.outcome
            if outcome is not None and not isinstance(outcome, records.Snapshot | records.Waiting):
                return outcome
        return (
            records.Failed(f"the result of request {seq} is gone: {_GONE}") if seq <= self._snapshot else None
        )

    def reason(self) -> str:
        """Say why the next result takes long; "" where the door knows no reason."""
        if self._trouble or self._reason:
            return self._trouble or self._reason
        expected = max([*self._places, self._snapshot]) + 1
        ahead = [seq for seq in self._digests if seq > expected]
        late = time.monotonic() - self._waits_since > _HOLE_SECONDS
        return f"request {expected} never came" if ahead and not self.knows(expected) and late else ""

    def _read_requests(self) -> None:
        before = START
        for request, behind in read(self._requests, records.Request):
            self._digests.setdefault(request.seq, request.digest)
            is_same = behind.segment == before.segment
            self._sizes[request.seq] = behind.offset - (before.offset if is_same else 0)
            self.used = max(self.used, request.at)
            before = behind

    def _take(self, result: records.Result, place: Position) -> None:
        """Take in a record of the lane, which begins at `place`."""
        match result.outcome:
            case records.Snapshot():
                self._snapshot = max(self._snapshot, result.seq)
            case records.Waiting():
                self._reason = result.outcome.reason
            case outcome:
                if result.seq in self._places or result.seq in self._saved:
                    return
                self._places[result.seq] = place
                self._reason = ""
                self._sizes.pop(result.seq, None)
                self._waits_since = time.monotonic()
                if isinstance(outcome, records.Saved | records.Published):
                    self._saved[result.seq] = result

    def _forget(self) -> None:
        """Forget requests that are not done again, and places in segments that are gone."""
        for seq in [seq for seq in self._digests if seq <= self._snapshot]:
            del self._digests[seq]
            self._sizes.pop(seq, None)
        # a record may begin behind the end of the segment before
        first = min(segments_of(self._results), default=-1) - 1
        for seq in [seq for seq, place in self._places.items() if START.segment < place.segment < first]:
            del self._places[seq]

    async def _follow(self) -> None:
        try:
            async for result, position in follow(self._results, records.Result, self._behind):
                snapshot = self._snapshot
                self._take(result, self._behind)
                self._behind = position
                async with self._came:
                    self._came.notify_all()
                if self._snapshot > snapshot:
                    async with self._writing:
                        if self._log is not None:
                            await asyncio.to_thread(self._log.drop, self._snapshot + 1)
                        self._forget()
        except (OSError, LoradError) as error:
            self._trouble = f"the log of this model cannot be read: {error}"
            log.exception("%s", self.directory)
