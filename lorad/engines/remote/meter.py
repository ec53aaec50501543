"""What an engine of servers says of itself, in the names of `EngineHealth`."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from lorad.engines.base import EngineHealth
from lorad.engines.remote.call import Call
from lorad.engines.remote.dialect import Metrics
from lorad.engines.remote.fleet import Fleet
from lorad.engines.remote.server import Server
from lorad.errors import LoradError

N = TypeVar("N", int, float)
_RATE_SECONDS = 5.0
_HITS_SECONDS = 60.0
_FRESH_SECONDS = 1.0  # what servers said is repeated for so long
_ANSWER_SECONDS = 1.0


class Meter:
    """All methods belong to the engine's asyncio loop."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()
        self._prompts: deque[tuple[float, int, int]] = deque()  # time, prompt tokens and cached ones so far
        self._told: list[Metrics] = []
        self._told_at = float("-inf")

    def count(self, tokens: int) -> None:
        """Count new tokens."""
        self._tokens.append((time.monotonic(), tokens))
        while self._tokens and self._tokens[0][0] < time.monotonic() - _RATE_SECONDS:
            self._tokens.popleft()

    async def health(self, fleet: Fleet, calls: Sequence[Call]) -> EngineHealth:
        if time.monotonic() - self._told_at > _FRESH_SECONDS:
            told = await asyncio.gather(*(_ask(server) for server in fleet.serving))
            self._told, self._told_at = [metrics for metrics in told if metrics is not None], time.monotonic()
            self._note_prompts()
        since = time.monotonic() - _RATE_SECONDS
        return EngineHealth(
            alive=any(server.state not in ("failed", "closed") for server in fleet.servers),
            asleep=fleet.asleep,
            running=sum(call.running for call in calls),
            waiting=sum(call.waiting for call in calls),
            tokens_per_second=sum(count for at, count in self._tokens if at >= since) / _RATE_SECONDS,
            slots_used=_most([metrics.slots_used for metrics in self._told]),
            slots=_most([metrics.slots for metrics in self._told]),
            prefix_hits=self._hits(),
            cache_used=_most([metrics.cache_used for metrics in self._told]),
            detail=_detail(fleet.servers),
        )

    def _note_prompts(self) -> None:
        told = [m for m in self._told if m.prompt_tokens is not None and m.cached_tokens is not None]
        if told:
            total, cached = sum(m.prompt_tokens or 0 for m in told), sum(m.cached_tokens or 0 for m in told)
            if self._prompts and total < self._prompts[-1][1]:
                self._prompts.clear()  # a server began again
            self._prompts.append((time.monotonic(), total, cached))
        while len(self._prompts) > 2 and self._prompts[0][0] < time.monotonic() - _HITS_SECONDS:
            self._prompts.popleft()

    def _hits(self) -> float | None:
        if len(self._prompts) < 2 or self._prompts[-1][1] == self._prompts[0][1]:
            return None
        (_, total, cached), (_, total_now, cached_now) = self._prompts[0], self._prompts[-1]
        return (cached_now - cached) / (total_now - total)


async def _ask(server: Server) -> Metrics | None:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await server.dialect.metrics(server.http)
    except (LoradError, TimeoutError):
        return None


def _most(values: Sequence[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def _detail(servers: Sequence[Server]) -> str:
    up = sum(server.state in ("up", "asleep") for server in servers)
    trouble = [_trouble(server) for server in servers if server.state not in ("up", "asleep")]
    return "; ".join([f"{up} of {len(servers)} servers serve", *trouble]) if trouble else ""


def _trouble(server: Server) -> str:
    why = f": {server.error.message.splitlines()[0]}" if server.error else ""
    return f"server {server.index} is {server.state}{why}"
