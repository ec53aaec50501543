"""Requests that need a pool: one that is warm is theirs at once, for another one the loop finds a place."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.queue import place
from lorad.daemon.serving.borrow_pool import hold_pool
from lorad.errors import Conflict, StorageError
from lorad.store import runs
from tests.kit.daemon_world import hold, idle_pools, open_context, reconciling, submit, until_state


async def held(ctx: Context, name: str) -> Pool:
    """Hold the pool of a run for a moment."""
    async with hold_pool(ctx, runs.get(ctx.store, name)) as pool:
        assert pool.guests == 1
        return pool


async def test_warm_pool_is_held_without_a_snapshot(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reconciling(home) as ctx:
        await idle_pools(ctx, "one")
        looks: list[object] = []
        monkeypatch.setattr(place, "take_snapshot", lambda *_: looks.append(1))
        monkeypatch.setattr("lorad.daemon.serving.borrow_pool.PoolRequest", None)  # the loop is not asked
        async with asyncio.timeout(60):
            assert (await held(ctx, "one")).id == "one-1" and looks == []


async def test_request_waits_until_idle_pools_left(home: Path) -> None:
    async with reconciling(home) as ctx:
        await idle_pools(ctx, "one", "two")
        assert not ctx.pools["one-1"].process.is_up
        async with AsyncExitStack() as stack:
            for _ in range(2):  # the second finds it warm, or waits for the same one
                pool = await stack.enter_async_context(hold_pool(ctx, runs.get(ctx.store, "one")))
            assert (pool.id, pool.guests, ctx.pools["two-1"].process.is_up) == ("one-1", 2, False)


async def test_request_is_refused_where_a_run_works(home: Path) -> None:
    async with reconciling(home) as ctx:
        await idle_pools(ctx, "one")
        hold(home)
        submit(ctx, "busy", model="/models/two")
        await until_state(ctx, "busy", "running")
        with pytest.raises(Conflict, match="no device is free for /models/one: pool two-1 is busy with run"):
            await held(ctx, "one")
        assert ctx.queue.requests == []


async def test_pool_of_a_request_has_it_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reconciling(home) as ctx:
        await idle_pools(ctx, "one")
        monkeypatch.setattr("lorad.daemon.serving.borrow_pool.warm_pool", lambda *_: None)
        task = asyncio.create_task(held(ctx, "one"))
        await asyncio.sleep(0)
        place.place_requests(ctx)
        assert ctx.pools["one-1"].guests == 1  # no run behind it stops the pool
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ctx.pools["one-1"].guests == 0 and ctx.queue.requests == []


async def test_trouble_of_one_request_is_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise StorageError("the disk is full")

    async with reconciling(home) as ctx:
        await idle_pools(ctx, "one", "two")
        with monkeypatch.context() as patch:
            patch.setattr(place, "find_or_make", fails)
            patch.setattr(place, "choose_devices", lambda now, candidates: candidates[0])
            with pytest.raises(StorageError, match="the disk is full"):
                await held(ctx, "one")
        assert ctx.loop.troubles.lines() == [] and (await held(ctx, "one")).id == "one-1"


async def test_request_that_goes_leaves_nothing(home: Path) -> None:
    ctx = open_context(home)  # whose loop answers nobody
    submit(ctx, "a")
    task = asyncio.create_task(held(ctx, "a"))
    await asyncio.sleep(0)
    assert [request.run.name for request in ctx.queue.requests] == ["a"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ctx.queue.requests == [] and not ctx.pools
