"""Gradients of several runs in the same passes, where the same bits are not asked for.

Calls that wait at the same time are done together, up to a number of tokens; larger ones go alone, in turns.
A run that asked again soon after its last pass is waited for, as two runs would take turns for ever else:
each asks while the other's pass is made.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lorad.models.turns import WORK, Caller, Together, caller
from lorad.pool.work import tokens_of
from lorad.protocol.batch import Gradients
from lorad.protocol.calls import ForwardBackward
from lorad.trainers.base import Trainer, check_work

MOST_TOKENS = 16384  # at once, each sample counted with its prompt
_SOON = 0.5  # of the seconds of the last pass: so long a run is waited for
_SMALL = 4096  # tokens of passes that gain by company, as they take time for few tokens as well


@dataclass(eq=False)
class JointCall:
    """One call."""

    work: ForwardBackward
    caller: Caller
    tokens: int
    at: float = field(default_factory=time.perf_counter)
    done: asyncio.Future[Gradients] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Joint:
    """Calls that are done together, or each by itself unless it `joins` them; for the pool's asyncio loop."""

    def __init__(self, trainer: Trainer, *, joins: bool) -> None:
        self._trainer = trainer
        self._joins = joins
        self._waiting: list[JointCall] = []
        self._worker: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        self.returns = _Returns()

    async def forward_backward(self, work: ForwardBackward) -> Gradients:
        """Do what `Trainer.forward_backward` does.

        A call with wrong arguments fails alone and does not delay the others.
        """
        if self._joins:
            check_work([work], self._trainer.slots(), self._trainer.capabilities())
        if not self._joins or tokens_of(work.batch) > MOST_TOKENS:
            return await self._trainer.forward_backward(
                work.slot, work.batch, work.targets, work.loss, work.normaliser
            )
        waiting = JointCall(work, caller(), max(1, tokens_of(work.batch)))
        self._waiting.append(waiting)
        self.returns.came(work.slot)
        self._came.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.done

    async def _work(self) -> None:
        while calls := await self._gathered():
            now = time.perf_counter()
            for call in calls:
                call.caller.wait(now - call.at)
            WORK.set(Together([call.caller for call in calls], [call.tokens for call in calls]))
            try:
                with self.returns.passing({call.work.slot: call.tokens for call in calls}):
                    stats = await self._trainer.forward_backward_many([call.work for call in calls])
            except Exception as error:
                for call in calls:
                    if not call.done.done():
                        call.done.set_exception(error)
            else:
                for call, own in zip(calls, stats, strict=True):
                    if not call.done.done():
                        call.done.set_result(own)

    async def _gathered(self) -> list[JointCall]:
        """Take the calls that have waited longest, at most one per slot and MOST_TOKENS tokens, off the
        queue, once the ones have come that are expected soon.
        """
        while True:
            waiting = [asked.tokens for asked in self._waiting if not asked.done.done()]
            room = _SMALL - sum(waiting) if waiting else 0  # nobody is waited for where nothing waits
            if (seconds := self.returns.seconds_worth_waiting(room)) <= 0:
                break
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), seconds)
        self._waiting = [asked for asked in self._waiting if not asked.done.done()]
        calls: dict[str, JointCall] = {}
        tokens = 0
        for asked in self._waiting:
            if asked.work.slot in calls or (calls and tokens + asked.tokens > MOST_TOKENS):
                break
            calls[asked.work.slot] = asked
            tokens += asked.tokens
        self._waiting = self._waiting[len(calls) :]
        return list(calls.values())


class _Away(NamedTuple):
    """A slot whose pass, number `group` of all, ended by the clock of `_Returns`."""

    ended: float
    group: int
    tokens: int


class _Returns:
    """Which slots ask again soon after their pass, on a clock that stands still while a pass is made: what a
    run does between its passes has to wait for the passes of others.
    """

    def __init__(self) -> None:
        self._away: dict[str, _Away] = {}
        self._quick: set[str] = set()
        self._busy = self._began = self._last = 0.0
        self._groups = 0

    def came(self, slot: str) -> None:
        if (away := self._away.pop(slot, None)) is None:
            return
        if self._left(away) > 0:
            self._quick.add(slot)
        else:
            self._quick.discard(slot)

    def seconds_worth_waiting(self, room: int) -> float:
        """Return how long to wait for a run that will probably come soon and whose tokens fit."""
        quick = [away for slot, away in self._away.items() if slot in self._quick and away.tokens <= room]
        return max(map(self._left, quick), default=0.0)

    @contextlib.contextmanager
    def passing(self, tokens: Mapping[str, int]) -> Iterator[None]:
        """Make a pass of some slots, each with so many tokens in it."""
        self._began = time.perf_counter()
        self._groups += 1
        try:
            yield
        finally:
            self._last = time.perf_counter() - self._began
            self._busy += self._last
            self._began = 0.0
            self._away |= {slot: _Away(self._now(), self._groups, own) for slot, own in tokens.items()}

    def forget(self, slot: str) -> None:
        """Wait for a slot no more, as it is closed."""
        self._away.pop(slot, None)
        self._quick.discard(slot)

    def _left(self, away: _Away) -> float:
        """Return the seconds until it is late, as it is when a second pass of others has begun."""
        is_late = self._groups > away.group + 1
        return 0.0 if is_late else away.ended + _SOON * self._last - self._now()

    def _now(self) -> float:
        return (self._began or time.perf_counter()) - self._busy
