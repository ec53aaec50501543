"""Counts requests by the name that was asked for and by the version that served them: O(1) for each, in
bounded memory.

The counts are written to a file, off the event loop; requests are served even if that fails.
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

NAMES = 256  # that are counted; of more, those that nobody asked for the longest are forgotten
RECENT = 256  # answers of a name whose seconds are remembered
_PERIOD = 1.0  # seconds between two files
_LEFT = (asyncio.CancelledError, ConnectionResetError)  # the client went away

_Clock = Callable[[], float]


class _PerSecond:
    """Counts for each of the last WINDOW seconds."""

    def __init__(self) -> None:
        self._counts, self._second = [0] * int(WINDOW), 0

    def add(self, now: float, count: int) -> None:
        self._turn(int(now))
        self._counts[self._second % len(self._counts)] += count

    def rate(self, now: float) -> float:
        self._turn(int(now))
        return sum(self._counts) / WINDOW

    def _turn(self, second: int) -> None:
        for gone in range(max(self._second, second - len(self._counts)) + 1, second + 1):
            self._counts[gone % len(self._counts)] = 0
        self._second = max(self._second, second)


class _Timing(NamedTuple):
    """ended: by the clock; first, seconds: until the first token, if it was streamed, and until the end."""

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
    made: _PerSecond = field(default_factory=_PerSecond)
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
            tokens_per_second=self.made.rate(now),
            ttft_p50=_quantile(firsts, 0.5),
            ttft_p95=_quantile(firsts, 0.95),
            p50=_quantile(seconds, 0.5),
            p95=_quantile(seconds, 0.95),
        )


def _quantile(values: list[float], share: float) -> float | None:
    """The nearest rank, of values in order."""
    return values[math.ceil(share * len(values)) - 1] if values else None


class Traffic:
    """All use of it belongs to the event loop."""

    def __init__(self, clock: _Clock = time.monotonic) -> None:
        self.clock = clock
        self._since = time.time()
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()
        self._touched = clock()

    def of(self, name: str) -> _Tally:
        """The tally of a name that there is: a new one makes another one forgotten where there
        are too many.
        """
        if name not in self._tallies and len(self._tallies) >= NAMES:
            idle = next((known for known, tally in self._tallies.items() if not tally.in_flight), None)
            self._tallies.pop(idle or "", None)
        tally = self._tallies.setdefault(name, _Tally())
        self._tallies.move_to_end(name)
        return tally

    def touch(self) -> float:
        """Something is counted: the time of the clock."""
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
    """Wraps one request, from its arrival on, and counts it for the names given to `serves`."""

    def __init__(self, traffic: Traffic, *, streams: bool = False) -> None:
        self._traffic, self._streams = traffic, streams
        self._began = traffic.touch()
        self._first: float | None = None
        self._tallies: dict[str, _Tally] = {}
        self._is_whole = self._is_failed = False

    def serves(self, *names: str) -> None:
        """Names that are known to mean something."""
        for name in names:
            if name not in self._tallies:
                self._tallies[name] = tally = self._traffic.of(name)
                tally.in_flight += 1

    def said(self, tokens: int) -> None:
        now = self._traffic.touch()
        self._first = now - self._began if self._first is None and tokens else self._first
        for tally in self._tallies.values():
            tally.tokens += tokens
            tally.made.add(now, tokens)

    def whole(self) -> None:
        """All was answered."""
        self._is_whole = True

    def failed(self) -> None:
        """Count the request as one that ended early, through no fault of the client."""
        self._is_failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        now = self._traffic.touch()
        answered = from_lorad(error) if isinstance(error, LoradError) else error
        # the request asks for something that nobody can serve
        refused = isinstance(answered, ApiError) and answered.status < 500
        failed = self._is_failed or (error is not None and not refused and not isinstance(error, _LEFT))
        for tally in self._tallies.values():
            tally.in_flight -= 1
            if refused:
                continue
            tally.requests += 1
            tally.failed += failed
            tally.ends.add(now, 1)
            if self._is_whole and not failed:
                tally.recent.append(_Timing(now, self._first if self._streams else None, now - self._began))


@contextlib.asynccontextmanager
async def reporting(traffic: Traffic, path: Path) -> AsyncIterator[None]:
    """The file is there from here on, and gone at the end."""
    await asyncio.to_thread(put, path, traffic.report())
    task = asyncio.create_task(_report(traffic, path))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(path.unlink, missing_ok=True)


async def _report(traffic: Traffic, path: Path) -> None:
    while True:
        await asyncio.sleep(_PERIOD)
        if not traffic.is_settled:
            await asyncio.to_thread(put, path, traffic.report())


def put(path: Path, report: Report) -> None:
    """Whole, by one rename; nobody needs it after a power cut.

    A disk that does not take it leaves the old one.
    """
    try:
        write_whole(path, msgspec.json.encode(report), durable=False)
    except OSError as error:
        log.debug("%s: %s", path, error)
