"""Counts requests by the name that was asked for and by the version that served them.

Each request costs O(1), and the memory is bounded. The counts are written to a file, off the event loop;
requests are served even if that fails.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from lorad.errors import LoradError
from lorad.files import write_whole
from lorad.gateway.errors import ApiError, from_lorad
from lorad.protocol.traffic import WINDOW, Figures, Report

log = logging.getLogger(__name__)

NAMES = 256  # that are counted at once; the one that nobody asked for the longest is forgotten first
RECENT = 256  # answers of a name whose seconds are remembered
_PERIOD = 1.0  # seconds between two files
_LEFT = (asyncio.CancelledError, ConnectionResetError)  # the client went away

_Clock = Callable[[], float]


class _PerSecond:
    """Counts for each of the last WINDOW seconds."""

    def __init__(self) -> None:
        self._counts = [0] * int(WINDOW)
        self._second = 0

    def add(self, now: float, count: int) -> None:
        """Count something in this second; the seconds that have passed since the last one are empty."""
        for second in range(max(self._second, int(now) - len(self._counts)) + 1, int(now) + 1):
            self._counts[second % len(self._counts)] = 0
        self._second = max(self._second, int(now))
        self._counts[self._second % len(self._counts)] += count

    def rate(self, now: float) -> float:
        self.add(now, 0)
        return sum(self._counts) / WINDOW


class _Timing(NamedTuple):
    """How long an answer took.

    Attributes:
        ended: When it ended, by the clock.
        first: Seconds until the first token; None where it was not streamed.
        seconds: Seconds until the end.
    """

    ended: float
    first: float | None
    seconds: float


@dataclass
class _Tally:
    """The counts of one name."""

    requests: int = 0
    in_flight: int = 0
    failed: int = 0
    tokens: int = 0
    ends: _PerSecond = field(default_factory=_PerSecond)
    token_counts: _PerSecond = field(default_factory=_PerSecond)
    recent: deque[_Timing] = field(default_factory=lambda: deque(maxlen=RECENT))

    def figures(self, now: float) -> Figures:
        recent = [answer for answer in self.recent if now - answer.ended <= WINDOW]
        firsts = sorted(answer.first for answer in recent if answer.first is not None)
        seconds = sorted(answer.seconds for answer in recent)
        return Figures(
            requests=self.requests,
            in_flight=self.in_flight,
            failed=self.failed,
            tokens=self.tokens,
            requests_per_second=self.ends.rate(now),
            tokens_per_second=self.token_counts.rate(now),
            ttft_p50=_quantile(firsts, 0.5),
            ttft_p95=_quantile(firsts, 0.95),
            p50=_quantile(seconds, 0.5),
            p95=_quantile(seconds, 0.95),
        )


def _quantile(values: list[float], share: float) -> float | None:
    """Return the value at the nearest rank, of values in order."""
    return values[math.ceil(share * len(values)) - 1] if values else None


class Traffic:
    """Has the counts of all names; only the event loop uses it."""

    def __init__(self, clock: _Clock = time.monotonic) -> None:
        self.clock = clock
        self._since = time.time()
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()
        self._touched = clock()

    def of(self, name: str) -> _Tally:
        """Return the tally of a name; a new name makes another one forgotten where there are too many."""
        if name not in self._tallies and len(self._tallies) >= NAMES:
            idle = next((other for other, tally in self._tallies.items() if not tally.in_flight), None)
            self._tallies.pop(idle or "", None)
        tally = self._tallies.setdefault(name, _Tally())
        self._tallies.move_to_end(name)
        return tally

    def touch(self) -> float:
        """Note that something is counted now, and return the time of the clock."""
        self._touched = self.clock()
        return self._touched

    @property
    def is_settled(self) -> bool:
        """Whether everything counted has left the window, so that figures stay as they are."""
        return self.clock() - self._touched > WINDOW + 2 * _PERIOD

    def report(self) -> Report:
        now = self.clock()
        return Report(self._since, {name: tally.figures(now) for name, tally in self._tallies.items()})


class Counted:
    """Wraps one request, from its arrival on, and counts it for the names that `serves` gets.

    Attributes:
        is_whole: Everything was answered.
        is_failed: The request ended early, through no fault of the client.
    """

    def __init__(self, traffic: Traffic, *, streams: bool = False) -> None:
        self._traffic = traffic
        self._streams = streams
        self._began = traffic.touch()
        self._first: float | None = None
        self._tallies: dict[str, _Tally] = {}
        self.is_whole = False
        self.is_failed = False

    def serves(self, *names: str) -> None:
        """Count the request for these names, which mean something."""
        for name in names:
            if name not in self._tallies:
                self._tallies[name] = tally = self._traffic.of(name)
                tally.in_flight += 1

    def count_tokens(self, tokens: int) -> None:
        now = self._traffic.touch()
        self._first = now - self._began if self._first is None and tokens else self._first
        for tally in self._tallies.values():
            tally.tokens += tokens
            tally.token_counts.add(now, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        now = self._traffic.touch()
        answered = from_lorad(error) if isinstance(error, LoradError) else error
        # the request asks for something that nobody can serve
        refused = isinstance(answered, ApiError) and answered.status < 500
        failed = self.is_failed or (error is not None and not refused and not isinstance(error, _LEFT))
        for tally in self._tallies.values():
            tally.in_flight -= 1
            if refused:
                continue
            tally.requests += 1
            tally.failed += failed
            tally.ends.add(now, 1)
            if self.is_whole and not failed:
                tally.recent.append(_Timing(now, self._first if self._streams else None, now - self._began))


@contextlib.asynccontextmanager
async def reporting(traffic: Traffic, path: Path) -> AsyncIterator[None]:
    """Keep the counts in a file within the block; the file goes at its end."""

    async def keep_writing() -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            if not traffic.is_settled:
                await asyncio.to_thread(put, path, traffic.report())

    await asyncio.to_thread(put, path, traffic.report())
    task = asyncio.create_task(keep_writing())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(path.unlink, missing_ok=True)


def put(path: Path, report: Report) -> None:
    """Write a report whole, by one rename; nobody needs it after a power cut.

    A full disk leaves the old report.
    """
    try:
        write_whole(path, msgspec.json.encode(report), durable=False)
    except OSError as error:
        log.debug("%s: %s", path, error)
