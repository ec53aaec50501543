"""Run blocking calls for asyncio, each in a thread of its own that ends soon after nobody waits for it."""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from lorad.api.connection import given_up

R = TypeVar("R")


async def in_thread(call: Callable[[], R]) -> R:
    """Return what a call returns, or raise what it raises. After a cancellation it ends at its next `rest`.

    Each call has a thread: a thousand may wait at once, and none keeps the interpreter from exiting.
    """
    loop = asyncio.get_running_loop()
    nobody_waits = threading.Event()
    answer: asyncio.Future[R] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        given_up.set(nobody_waits)
        try:
            set_answer = functools.partial(answer.set_result, call())
        except BaseException as error:
            if isinstance(error, StopIteration):  # a future takes none
                error = RuntimeError("the iterator ended")
            set_answer = functools.partial(answer.set_exception, error)

        def hand_over() -> None:
            if not answer.done():
                set_answer()

        try:
            loop.call_soon_threadsafe(hand_over)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    threading.Thread(target=context.run, args=(work,), daemon=True, name="lorad").start()
    try:
        return await answer
    finally:
        nobody_waits.set()
