"""The compute thread: one quantum after another, and nobody waits behind more than one of another's."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from lorad.models.compute import Compute


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    compute = Compute()
    yield compute
    compute.close()


async def test_calls_take_turns_between_quanta(compute: Compute) -> None:
    order: list[str] = []
    queued = threading.Event()

    def quantum() -> int | None:
        queued.wait(60)
        order.append("quantum")
        return 7 if order.count("quantum") == 3 else None

    long = asyncio.create_task(compute.until(quantum))
    await asyncio.sleep(0)
    other = asyncio.create_task(compute.run(order.append, "other"))
    await asyncio.sleep(0)
    queued.set()
    await other
    assert await long == 7
    assert order == ["quantum", "other", "quantum", "quantum"]


async def test_an_error_in_a_quantum_reaches_the_caller(compute: Compute) -> None:
    def quantum() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await compute.until(quantum)


async def test_quanta_end_when_their_caller_is_cancelled(compute: Compute) -> None:
    started, count = asyncio.Event(), 0
    loop = asyncio.get_running_loop()

    def quantum() -> None:
        nonlocal count
        count += 1
        loop.call_soon_threadsafe(started.set)

    task: asyncio.Task[object] = asyncio.create_task(compute.until(quantum))
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await compute.run(lambda: None)  # behind the quantum that is under way, if one is
    before = count
    for _ in range(3):
        await compute.run(lambda: None)
    assert count == before


async def test_closing_ends_quanta_that_wait() -> None:
    compute, begun = Compute(), threading.Event()
    task: asyncio.Task[object] = asyncio.create_task(compute.until(begun.set))
    await asyncio.to_thread(begun.wait, 60)
    compute.close()
    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        await task
