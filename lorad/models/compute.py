"""The one thread that owns torch in a pool. Its quantum is one decode step or one micro-batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """Runs quanta one after another, first come first served; the asyncio loop stays free meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, quantum: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `quantum`, which runs to its end even when the caller is cancelled."""
        future = self._thread.submit(quantum, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def until(self, quantum: Callable[[], T | None]) -> T:
        """The first result of `quantum` that is not None; it runs again and again, each time behind all that wait."""
        found: Future[T] = Future()

        def queue() -> None:
            self._thread.submit(turn).add_done_callback(dropped)

        def dropped(queued: Future[None]) -> None:
            if queued.cancelled():  # by `close`
                found.cancel()

        def turn() -> None:
            if found.cancelled():
                return
            try:
                result = quantum()
                if result is None:
                    queue()
                elif found.set_running_or_notify_cancel():
                    found.set_result(result)
            except BaseException as error:
                if found.set_running_or_notify_cancel():
                    found.set_exception(error)

        queue()
        return await asyncio.wrap_future(found)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
