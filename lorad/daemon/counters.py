"""Counters since the daemon began: answers, swaps, and followers of events."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

from lorad.store.metrics import StepTotals

BOUNDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_FOLLOWED = "/v1/events"
_METHODS = frozenset({"GET", "POST", "DELETE"})
_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class _Histogram:
    """Seconds, by upper bound; the last count is of all that were longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self.counts[bisect_left(BOUNDS, seconds)] += 1


@dataclass
class Meter:
    """What the daemon counts.

    answers: by method and status.
    requests: how long they took, without event streams, which never end.
    """

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    requests: _Histogram = field(default_factory=_Histogram)
    swaps: _Histogram = field(default_factory=_Histogram)
    failed_swaps: int = 0
    followers: int = 0
    totals: StepTotals = field(default_factory=StepTotals)


def metered(meter: Meter) -> Middleware:
    """Make the middleware that counts every answer."""

    @web.middleware
    async def count(request: web.Request, handler: _Answer) -> web.StreamResponse:
        started = time.monotonic()
        status = 500
        follows = request.path == _FOLLOWED
        meter.followers += follows
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            meter.followers -= follows
            meter.answers[request.method if request.method in _METHODS else "other", status] += 1
            seconds = time.monotonic() - started
            if not follows:
                meter.requests.observe(seconds)
            if request.method == "POST" and request.path.startswith("/v1/aliases/"):
                if status < 400:
                    meter.swaps.observe(seconds)
                elif status >= 500:
                    meter.failed_swaps += 1

    return count
