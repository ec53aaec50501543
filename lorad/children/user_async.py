"""Answers many requests at a time in a process of user code; it imports the standard library alone."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

_Outcome = tuple[Any, BaseException | None]
_SLICES = 10  # of the time of a coroutine


async def answer_as_they_end(requests: BinaryIO, answer: Callable[[bytes], Awaitable[None]]) -> None:
    """Answer all requests, a line each, side by side; return at the end of `requests`."""
    loop = asyncio.get_running_loop()
    under_way: set[asyncio.Future[None]] = set()
    with ThreadPoolExecutor(1, "requests") as reader:
        while line := await loop.run_in_executor(reader, requests.readline):
            task = asyncio.ensure_future(answer(line))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


async def within(seconds: float, call: Awaitable[_Outcome]) -> _Outcome:
    """Wait for a call. Raises TimeoutError when it takes too long.

    Another call that blocks the event loop meanwhile, as it loads a model, takes at most a tenth of its time.
    """
    task = asyncio.ensure_future(call)
    for _ in range(_SLICES):
        await asyncio.wait([task], timeout=seconds / _SLICES)
        if task.done():
            return task.result()
    task.cancel()
    raise TimeoutError


async def outcome(call: Awaitable[Any]) -> _Outcome:
    """Return a call's result or error, also one that would end the event loop, but no cancellation."""
    try:
        return await call, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
