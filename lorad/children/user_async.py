"""Answer many requests at a time in a process of user code; as `user_code.py` it has the standard library."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

_Outcome = tuple[Any, BaseException | None]
_SLICES = 10  # of the time of a coroutine


async def answer_as_they_end(requests: BinaryIO, answer: Callable[[bytes], Awaitable[None]]) -> None:
    """Have all requests, a line each, under way at once; returns at the end of `requests`."""
    loop = asyncio.get_running_loop()
    under_way: set[asyncio.Future[None]] = set()
    with ThreadPoolExecutor(1, "requests") as reader:
        while line := await loop.run_in_executor(reader, requests.readline):
            task = asyncio.ensure_future(answer(line))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


async def within(seconds: float, call: Awaitable[_Outcome]) -> _Outcome:
    """Wait for a call. Raises TimeoutError when it takes too long; what blocks the event loop meanwhile, such
    as another call that loads a model, costs it a tenth of its time at most.
    """
    task = asyncio.ensure_future(call)
    for _ in range(_SLICES):
        await asyncio.wait([task], timeout=seconds / _SLICES)
        if task.done():
            return task.result()
    task.cancel()
    raise TimeoutError


async def outcome(call: Awaitable[Any]) -> _Outcome:
    """Keep what the call raises, also what would end the event loop; but not that its time is over."""
    try:
        return await call, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
