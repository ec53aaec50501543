"""Real trainers of several ranks, started once for many tests:
each test finds one as if nobody had used it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lorad.adapters.adapter import Adapter
from lorad.protocol.batch import Batch
from lorad.protocol.calls import TrainerVerb
from lorad.trainers.base import Trainer, TrainerCapabilities

T = TypeVar("T")
START_SECONDS = 1800.0

Start = Callable[[], Coroutine[Any, Any, Trainer]]


class Lender:
    """Starts trainers on a loop of its own, which outlives those of the tests."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trainers", daemon=True)
        self._thread.start()
        self._trainers: list[Trainer] = []
        self._lent: list[Lent] = []

    def lend(self) -> "Lent":
        """One that is not lent, started if need be."""
        if len(self._lent) == len(self._trainers):
            started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
            self._trainers.append(started.result(START_SECONDS))
        self._lent.append(Lent(self._trainers[len(self._lent)], self._loop))
        return self._lent[-1]

    def take_back(self) -> None:
        """Every slot that was opened is closed."""
        for lent in self._lent:
            for slot in lent.slots():
                asyncio.run_coroutine_threadsafe(lent.of.close(slot), self._loop).result(START_SECONDS)
        self._lent.clear()

    def close(self) -> None:
        for trainer in self._trainers:
            asyncio.run_coroutine_threadsafe(trainer.shut_down(), self._loop).result(START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Lent(Trainer):
    """A trainer of another loop, which it passes every call to."""

    def __init__(self, of: Trainer, loop: asyncio.AbstractEventLoop) -> None:
        self.of, self._loop = of, loop

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def capabilities(self) -> TrainerCapabilities:
        return self.of.capabilities()

    def modules(self) -> dict[str, tuple[int, int]]:
        return self.of.modules()

    def slots(self) -> tuple[str, ...]:
        return self.of.slots()

    async def do(self, verb: TrainerVerb[T]) -> T:
        return await self._there(self.of.do(verb))

    async def unmet_experts(self, batch: Batch) -> Sequence[str] | None:
        return await self._there(self.of.unmet_experts(batch))

    async def export(self, slot: str) -> Adapter:
        return await self._there(self.of.export(slot))
