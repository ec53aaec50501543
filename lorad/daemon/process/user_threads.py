"""Each user has threads and turns of their own: whoever stops their own pool, or has a disk that hangs, holds
up nobody else.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lorad.errors import Conflict

T = TypeVar("T")
_AT_ONCE = 8  # of one user
MOST = 256  # with those that wait; a request runs to its end though nobody waits for it any more


class Hands:
    """Threads for each user. Only the event loop may use it; what it runs is elsewhere."""

    def __init__(self) -> None:
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._busy: Counter[int] = Counter()

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


class UserTurns:
    """Lets each user do a few things at a time; a few more wait for their turn, in order."""

    def __init__(self, what: str, at_once: int, most: int) -> None:
        self._what = what
        self._at_once = at_once
        self._most = most
        self._there: Counter[int] = Counter()
        self._free: dict[int, asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block. Raises Conflict where too many wait."""
        if self._there[uid] >= self._most:
            count = f"{self._at_once} {self._what} are under way, {self._most - self._at_once} more wait"
            raise Conflict(f"of user {uid}, {count}", hint="Try again when some have ended.")
        self._there[uid] += 1
        try:
            async with self._free.setdefault(uid, asyncio.Semaphore(self._at_once)):
                yield
        finally:
            self._there[uid] -= 1
            if not self._there[uid]:
                del self._there[uid], self._free[uid]
