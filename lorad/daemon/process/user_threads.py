"""Threads and turns for each user, so that one whose pool or disk hangs delays nobody else."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from lorad.errors import Conflict

T = TypeVar("T")
_AT_ONCE = 8  # requests of one user that run at a time
MOST = 256  # requests that run or wait; one runs to its end though nobody waits for it any more


@dataclass(eq=False)
class Hands:
    """Threads for each user. Only the event loop may use this object."""

    _threads: dict[int, ThreadPoolExecutor] = field(default_factory=dict)
    _busy: Counter[int] = field(default_factory=Counter)

    async def do(self, uid: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the user's.

        Raises what it raises, and Conflict for a user who has too much under way.
        """
        if self._busy[uid] >= MOST:
            raise Conflict(
                f"{MOST} requests about what is user {uid}'s are under way", hint="Try again in a moment."
            )
        threads = self._threads.setdefault(uid, ThreadPoolExecutor(_AT_ONCE, f"user-{uid}"))
        self._busy[uid] += 1
        future = threads.submit(work)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._done, uid))
        return await asyncio.wrap_future(future)

    def _done(self, uid: int) -> None:
        self._busy[uid] -= 1
        self._busy += Counter()  # forget who has none


@dataclass(eq=False)
class UserTurns:
    """Lets each user do a few things at a time; a few more wait for their turn, in order."""

    what: str
    at_once: int
    most: int
    _present: Counter[int] = field(default_factory=Counter)
    _free: dict[int, asyncio.Semaphore] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block. Raises Conflict where too many wait."""
        if self._present[uid] >= self.most:
            count = f"{self.at_once} {self.what} are under way, {self.most - self.at_once} more wait"
            raise Conflict(f"of user {uid}, {count}", hint="Try again when some have ended.")
        self._present[uid] += 1
        try:
            async with self._free.setdefault(uid, asyncio.Semaphore(self.at_once)):
                yield
        finally:
            self._present[uid] -= 1
            if not self._present[uid]:
                del self._present[uid], self._free[uid]
