"""Who has the devices in a pool whose engine sleeps while the trainer trains: mode `timesliced`.

Work is *serving* or *training*; of one kind there may be as much at once as there is, of both never. The
engine sleeps or wakes only when the other kind is asked for and the present one has ended. Who serves waits
behind a trainer that waits, so that streams end; who trains does not wait behind streams, since a run trains
only on what it has sampled.

A trainer that can give its base back does so before the engine wakes, and has it again once the engine
sleeps: the trainer's base and the engine's cache are never there at once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from lorad.engines.base import Engine
from lorad.errors import Conflict
from lorad.models.turns import caller
from lorad.pool.ledger import Ledger
from lorad.trainers.base import Trainer

log = logging.getLogger(__name__)

MOST_WAITING = 1024  # callers
LINGER = 0.1  # seconds after a training verb in which its run is expected to make the next call

Kind = Literal["training", "serving"]
_KINDS: tuple[Kind, Kind] = ("training", "serving")
T = TypeVar("T")


@dataclass(eq=False)
class _Waiter:
    run: str
    is_stream: bool
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Phases:
    """Decides who may use the devices: training or serving. No method is called from inside another.

    All methods belong to the pool's asyncio loop.

    Args:
        is_timesliced: False when both kinds may run at once; then nothing ever waits here.
        trainer: Gives back what it used for a while before the engine wakes.
        lodger: A trainer whose base is off the devices while the engine is awake (and now); None where it
            stays on them.
        ledger: Bills the calls that are inside.

    Attributes:
        is_base_away: Whether the trainer's base is in host memory.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        is_timesliced: bool,
        trainer: Trainer | None = None,
        lodger: Trainer | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._engine = engine
        self._is_timesliced = is_timesliced
        self._trainer = trainer
        self._lodger = lodger
        self._ledger = Ledger() if ledger is None else ledger
        self.is_base_away = lodger is not None
        # None: a change failed, so that the engine is neither here nor there
        self._kind: Kind | None = "serving"
        self._inside = 0
        self._waiting: dict[Kind, list[_Waiter]] = {"training": [], "serving": []}
        self._change: asyncio.Task[None] | None = None
        self._trained = ""
        self._trained_at = 0.0

    def training(self, run: str) -> AbstractAsyncContextManager[None]:
        """Hold the devices for the trainer. Raises Conflict, and what the engine raised when it slept."""
        return self._phase("training", run)

    def serving(self, run: str = "") -> AbstractAsyncContextManager[None]:
        """Keep the engine awake inside the block.

        Raises Conflict, and what the engine raised when it woke.
        """
        return self._phase("serving", run)

    @asynccontextmanager
    async def with_base(self, run: str) -> AsyncIterator[None]:
        """Keep the trainer's base in place for other work than training; waits only where it may be away."""
        if self._lodger is not None:
            async with self.training(run):
                yield
        else:
            with self._ledger.working():
                yield

    async def stream(self, run: str, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Serve `chunks` of the engine; a reader that stops reading keeps no trainer waiting."""
        if not self._is_timesliced:
            with self._ledger.working():
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
            return
        queue: asyncio.Queue[T | None] = asyncio.Queue()

        async def pump() -> None:
            try:
                async with self._phase("serving", run, is_stream=True), aclosing(chunks):
                    async for chunk in chunks:
                        queue.put_nowait(chunk)
            finally:
                queue.put_nowait(None)

        task = asyncio.create_task(pump())
        try:
            while (item := await queue.get()) is not None:
                yield item
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle(self) -> None:
        """Wait for a change under way."""
        while self._change is not None:
            await asyncio.wait([self._change])

    @asynccontextmanager
    async def _phase(self, kind: Kind, run: str, *, is_stream: bool = False) -> AsyncIterator[None]:
        if not self._is_timesliced:
            with self._ledger.working():
                yield
            return
        asked = time.monotonic()
        await self._enter(kind, run, is_stream)
        caller().wait(time.monotonic() - asked)
        try:
            with self._ledger.working():
                yield
        finally:
            self._leave(kind, run)

    async def _enter(self, kind: Kind, run: str, is_stream: bool) -> None:
        if self._may_enter(kind):
            self._inside += 1
            return
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            raise Conflict(
                f"{MOST_WAITING} calls wait for their turn on the device",
                hint="Ask for less at once, or later.",
            )
        waiter = _Waiter(run, is_stream)
        self._waiting[kind].append(waiter)
        self._advance()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiting[kind]:
                self._waiting[kind].remove(waiter)
                self._advance()
            elif not waiter.turn.cancelled() and waiter.turn.exception() is None:  # its turn had just come
                self._leave(kind, waiter.run)
            raise

    def _may_enter(self, kind: Kind) -> bool:
        is_now = self._kind == kind and self._change is None
        return is_now and (kind == "training" or not self._waiting["training"])

    def _leave(self, kind: Kind, run: str) -> None:
        self._inside -= 1
        if kind == "training":
            self._trained = run
            self._trained_at = time.monotonic()
        self._advance()

    def _advance(self) -> None:
        """Let in who may enter now, and change to what is wanted when nothing is under way."""
        for kind in _KINDS:
            if self._may_enter(kind):
                self._let_in(kind)
        next_kind = next((kind for kind in _KINDS if self._waiting[kind]), None)
        if next_kind is None or self._inside or self._change is not None:
            return
        # The run that trained last keeps its turn for a moment, unless it waits itself for the engine. A
        # stream does not count: it may be what the run samples ahead.
        mine = (waiter for waiter in self._waiting["serving"] if waiter.run == self._trained)
        if self._kind == "training" and all(waiter.is_stream for waiter in mine):
            seconds = self._trained_at + LINGER - time.monotonic()
            if seconds > 0:
                asyncio.get_running_loop().call_later(seconds, self._advance)
                return
        self._change = asyncio.create_task(self._become(next_kind))

    def _let_in(self, kind: Kind, error: Exception | None = None) -> None:
        """Let in all who wait, or raise in them why the change failed."""
        waiting = self._waiting[kind]
        self._waiting[kind] = []
        for waiter in waiting:
            if waiter.turn.done():
                continue
            if error is None:
                self._inside += 1
                waiter.turn.set_result(None)
            else:
                waiter.turn.set_exception(error)

    async def _become(self, kind: Kind) -> None:
        """Change the phase, then let in all who wait for it, or raise in them why the change failed."""
        started = time.monotonic()
        self._kind = None
        error = None
        try:
            if kind == "training":
                await self._engine.sleep()
                if self._lodger is not None and self.is_base_away:
                    await self._lodger.onload()
                    self.is_base_away = False
            else:
                if self._lodger is not None and not self.is_base_away:
                    await self._lodger.offload()
                    self.is_base_away = True
                elif self._trainer is not None:
                    await self._trainer.relax()
                await self._engine.wake()
            self._kind = kind
            log.info("%s after a change of %.2f s", kind, time.monotonic() - started)
        except Exception as raised:
            log.error("the change to %s failed: %s", kind, raised)
            error = raised
        self._change = None
        self._let_in(kind, error)
        self._advance()
