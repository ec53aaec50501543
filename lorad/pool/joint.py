"""Gradients of several runs in the same passes, where the same bits are not asked for.

Calls that wait at the same time are done together, up to a number of tokens; larger ones go alone, in turns.
"""

import asyncio
import time
from dataclasses import dataclass, field

from lorad.models.turns import WORK, Caller, Together, caller
from lorad.pool.work import tokens_of
from lorad.protocol.batch import Gradients
from lorad.trainers.base import GradientWork, Trainer, check_work

MOST_TOKENS = 16384  # at once, each sample counted with its prompt


@dataclass(eq=False)
class Asked:
    """One call."""

    work: GradientWork
    caller: Caller
    tokens: int
    at: float = field(default_factory=time.perf_counter)
    done: asyncio.Future[Gradients] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Joint:
    """All methods belong to the pool's asyncio loop. joins:
    False where every call is to be done by itself.
    """

    def __init__(self, trainer: Trainer, *, joins: bool) -> None:
        self._trainer, self._joins = trainer, joins
        self._waiting: list[Asked] = []
        self._worker: asyncio.Task[None] | None = None

    async def forward_backward(self, work: GradientWork) -> Gradients:
        """See `Trainer.forward_backward`.

        A call with wrong arguments fails alone and does not delay the others.
        """
        tokens = tokens_of(work.batch)
        if not self._joins or tokens > MOST_TOKENS:
            return await self._trainer.forward_backward(
                work.slot, work.batch, work.targets, work.loss, work.normaliser
            )
        check_work([work], self._trainer.slots(), self._trainer.capabilities())
        asked = Asked(work, caller(), max(1, tokens))
        self._waiting.append(asked)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await asked.done

    async def _work(self) -> None:
        while some := self._next():
            now = time.perf_counter()
            for asked in some:
                asked.caller.wait(now - asked.at)
            WORK.set(Together([asked.caller for asked in some], [asked.tokens for asked in some]))
            try:
                stats = await self._trainer.forward_backward_many([asked.work for asked in some])
            except Exception as error:
                for asked in some:
                    if not asked.done.done():
                        asked.done.set_exception(error)
            else:
                for asked, own in zip(some, stats, strict=True):
                    if not asked.done.done():
                        asked.done.set_result(own)

    def _next(self) -> list[Asked]:
        """Take the calls that have waited longest, at most one per slot and MOST_TOKENS tokens, off the
        queue.
        """
        self._waiting = [asked for asked in self._waiting if not asked.done.done()]
        some: dict[str, Asked] = {}
        tokens = 0
        for asked in self._waiting:
            if asked.work.slot in some or (some and tokens + asked.tokens > MOST_TOKENS):
                break
            some[asked.work.slot] = asked
            tokens += asked.tokens
        self._waiting = self._waiting[len(some) :]
        return list(some.values())
