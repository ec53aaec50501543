"""The one thread that owns torch in a pool. Its quantum is one decode step or one micro-batch."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from lorad.models.turns import WORK, Payer, Turns, Work
from lorad.protocol.heartbeat import HEART

P = ParamSpec("P")
T = TypeVar("T")


class _Quantum(Generic[T]):
    """What to compute, and for whom. One that `repeats` runs until its result is not None."""

    __slots__ = ("asked", "compute", "outcome", "repeats", "work")

    def __init__(self, work: Work, compute: Callable[[], T | None], *, repeats: bool) -> None:
        self.work = work
        self.compute = compute
        self.repeats = repeats
        self.asked = 0.0
        self.outcome: Future[T | None] = Future()

    def run(self) -> bool:
        """Return whether it is to run again."""
        if self.outcome.cancelled():
            return False
        result, error = self._tried(self.compute)
        if error is None and result is None and self.repeats:
            return True
        self.tell(result, error)
        return False

    @staticmethod
    def _tried(compute: Callable[[], T | None]) -> tuple[T | None, BaseException | None]:
        """Return the result and the error, from a frame of its own: what a traceback refers to must not refer
        to the quantum.
        """
        try:
            return compute(), None
        except BaseException as error:
            return None, error

    def tell(self, result: T | None, error: BaseException | None) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return
        if error is None:
            self.outcome.set_result(result)
        else:
            self.outcome.set_exception(error)


class Watch(Protocol):
    """Sees each quantum, on the compute thread. Times are of the clock of `Compute`."""

    def starts(self, at: float, payers: Mapping[Payer, float]) -> None:
        """Note that a quantum starts, and who is billed for it, each with a weight."""

    def ends(self, at: float, payers: Mapping[Payer, float]) -> None:
        """Note that the quantum has ended; some of its payers may have come or gone meanwhile."""


class Compute:
    """Runs quanta one after another, in turns (see `lorad/models/turns.py`); the asyncio loop stays free
    meanwhile.

    `WORK` says for whom a quantum is where it is asked for; its cost is the seconds of `clock` that it takes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, watch: Watch | None = None) -> None:
        self._watch = watch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._turns: Turns[_Quantum[Any]] = Turns()
        self._lock = threading.Lock()
        self._clock = clock

    async def run(self, quantum: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `quantum`, which runs to its end even when the caller is cancelled."""
        result: T = await self._asked(_Quantum(WORK.get(), partial(quantum, *args, **kwargs), repeats=False))
        return result

    async def until(self, quantum: Callable[[], T | None]) -> T:
        """Return the first result of `quantum` that is not None; it runs again and again, whenever it is its
        turn.
        """
        result: T = await self._asked(_Quantum(WORK.get(), quantum, repeats=True))
        return result

    async def each(self, quanta: Iterable[Callable[[], T]]) -> list[T]:
        """Return the results of all of them, in their order."""
        left = iter(quanta)
        results = list[T]()
        following = next(left, None)
        if following is None:
            return results

        def quantum() -> list[T] | None:
            nonlocal following
            assert following is not None
            results.append(following())
            following = next(left, None)
            return results if following is None else None

        return await self.until(quantum)

    async def _asked(self, quantum: _Quantum[Any]) -> Any:
        self._put(quantum)
        return await asyncio.wrap_future(quantum.outcome)

    def _put(self, quantum: _Quantum[Any]) -> None:
        quantum.asked = self._clock()
        with self._lock:
            self._turns.put(quantum.work, quantum)
        try:
            self._thread.submit(self._turn)
        except RuntimeError as error:  # closed
            quantum.tell(None, error)

    def _turn(self) -> None:
        """Run the quantum whose turn it is, of all that wait."""
        with self._lock:
            turn = self._turns.take()
        quantum = turn.what
        started = self._clock()
        turn.work.wait(started - quantum.asked)
        HEART.work("computing")
        if self._watch is not None:
            self._watch.starts(started, turn.work.payers())
        goes_on = quantum.run()
        HEART.work("")
        ended = self._clock()
        if self._watch is not None:
            self._watch.ends(ended, turn.work.payers())
        seconds = ended - started
        if goes_on:
            self._put(quantum)
        with self._lock:
            self._turns.charge(turn, seconds)

    def close(self) -> None:
        """Cancel the work that has not begun, and wait for the rest."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        while self._turns:
            self._turns.take().what.outcome.cancel()
