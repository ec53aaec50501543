"""What one owner may have of the door, and that others notice nothing of who has too much."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorad.tinker.door import app, sampling
from lorad.tinker.door.routes import sessions
from tests.tinker.door_kit import BASE, Caller, World, a_pass, home_with_keys, running_door


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_door(home_with_keys(tmp_path / "home")) as world:
        yield world


async def test_one_owner_has_so_many_sessions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MOST_SESSIONS", 2)
    first, _ = await world.alice.session(), await world.alice.session()
    body = {"sdk_version": "0.38.0"}
    assert "close some" in (await world.alice.ask("create_session", body, status=400))["detail"]
    await world.bob.session()
    await world.alice.ask(f"sessions/{first}/finish", {"reason": {"type": "success"}}, status=204)
    await world.door.models.park_silent(300.0)
    await world.alice.session()


async def a_sampler(caller: Caller) -> dict[str, Any]:
    """Return a request for samples, which lacks its number."""
    body = {"session_id": await caller.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await caller.ask("create_sampling_session", body))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    return {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {}}


@pytest.mark.parametrize("limit", ["_MOST_OF_ONE", "_MOST"])
async def test_samples_over_the_limit_wait(world: World, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Others notice nothing of it: they are answered meanwhile."""
    monkeypatch.setattr(sampling, limit, 2)
    monkeypatch.setattr(sampling, "_ALWAYS", 1)
    slow = asyncio.Event()

    async def answer(name: str, wish: Any, waits: Any) -> bytes:
        await asyncio.wait_for(slow.wait() if wish.sampling.max_new_tokens > 1 else asyncio.sleep(0), 10)
        return b"done"

    monkeypatch.setattr(world.door.pools, "answer", answer)
    asked, others = await a_sampler(world.alice), await a_sampler(world.bob)
    for seq in (1, 2):
        await world.alice.ask("asample", asked | {"seq_id": seq})
    detail = (await world.alice.ask("asample", asked | {"seq_id": 3}, status=429))["detail"]
    assert "2 of your requests for samples" in detail
    for seq in range(1, 9):
        short = others | {"seq_id": seq, "sampling_params": {"max_tokens": 1}}
        request = (await world.bob.ask("asample", short))["request_id"]
        assert await world.bob.result(request) == b"done"
    slow.set()
    await world.alice.result(f"{asked['sampling_session_id']}:1")
    await world.alice.ask("asample", asked | {"seq_id": 3})


async def test_one_owner_has_so_many_bytes_waiting(tmp_path: Path) -> None:
    """Once they have results the next are taken; others notice nothing, and a new door counts the same."""
    home = home_with_keys(tmp_path / "home")
    async with running_door(home, log_bytes=600) as world:
        alice, bob = world.alice, world.bob
        models = [(caller, await caller.model(await caller.session())) for caller in (alice, bob)]
        (_, own), (_, other) = models
        world.lanes.held.clear()
        for seq in (1, 2):
            await alice.forward_backward(own, seq)
        assert "log_bytes: 600" in await alice.forward_backward(own, 3, status=429)
        await alice.forward_backward(own, 2)  # once more
        await bob.forward_backward(other, 1)
    async with running_door(home, world.daemon, log_bytes=600) as world:
        world.lanes.held.clear()
        await world.alice.ask("retrieve_future", {"request_id": f"{own}:1"}, status=408)
        assert "log_bytes: 600" in await world.alice.forward_backward(own, 3, status=429)
        world.lanes.held.set()
        await world.alice.result(f"{own}:2")
        await world.alice.result(await world.alice.forward_backward(own, 3))


async def test_small_requests_have_small_bodies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await world.alice.model(await world.alice.session())
    monkeypatch.setattr(app, "_SMALL_BYTES", 100)
    assert len(a_pass(model, 1)) > 100
    await world.alice.forward_backward(model, 1)
    body = {"sdk_version": "0.38.0", "user_metadata": {"x": "y" * 99}}
    assert "takes at most 100 bytes" in (await world.alice.ask("create_session", body, status=413))["detail"]
