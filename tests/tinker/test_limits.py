"""What one owner may have of the door, and that others notice nothing of who has too much."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lorad.protocol.batch import Sampling
from lorad.tinker.door import app, sampling, state
from lorad.tinker.door.routes import samplers, sessions
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


async def test_a_request_cancelled_at_once_has_ended(world: World) -> None:
    """It takes no place of its owner, and its polls are answered."""
    samples: Any = world.door.samples
    wish = sampling.Wish(np.array([5], np.int32), np.array([7], np.uint64), Sampling(1))
    samples.start("s:1", "digest", "alice", "a@1", wish)
    samples.cancel("alice", "s:1")
    request = samples.find("s:1")
    assert await request.wait(5.0) and request.error == ("it was cancelled", "user")
    assert samples._under_way["alice"] == 0


async def test_results_forgotten_early_count_nothing(world: World) -> None:
    """A client that names a request before it has ended gets no room for more results by it."""
    samples: Any = world.door.samples
    wish = sampling.Wish(np.array([5], np.int32), np.array([7], np.uint64), Sampling(1))
    samples.start("s:1", "digest", "alice", "a@1", wish)
    samples.find("s:1").body = b"result"
    samples.forget(["s:1"], "alice")
    assert samples._result_bytes["alice"] == 0


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


@pytest.mark.parametrize(
    ("verb", "odd"),
    [
        ("optim_step", b'"nobody reads it": 1e400'),
        ("optim_step", b'"nobody reads it": "\xff"'),
        ("save_weights", b'"nobody reads it": ' + b"9" * 5000),
        ("create_model", b'"lora_config": {"seed": 18446744073709551616}'),
        ("create_model", b'"lora_config": {"rank": 18446744073709551615}'),
        ("asample", b'"prompt": {"chunks": [{"tokens": [18446744073709551616]}]}'),
        ("asample", b'"sampling_params": {"stop": [%s]}' % b",".join([b"7"] * 65)),
        ("asample", b'"seq_id": 2000000000'),
    ],
)
async def test_what_no_client_sends_is_refused(world: World, verb: str, odd: bytes) -> None:
    asked = await a_sampler(world.alice) | {"seq_id": 1}
    model = await world.alice.model(asked["sampling_session_id"].partition(":")[0])
    asked |= {"model_id": model, "session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": BASE}
    body = msgspec.json.encode(asked)[:-1] + b", " + odd + b"}"
    status, answer = await world.alice.asked(verb, body)
    assert status in (400, 422), answer


async def test_what_was_sent_is_not_told_back_whole(world: World) -> None:
    """Neither in an answer, nor in a result, which is kept."""
    model = await world.alice.model(await world.alice.session())
    assert len((await world.alice.ask("get_info", {"model_id": "x" * 20000}, status=404))["detail"]) < 2500
    request = await world.alice.send("optim_step", model, 1, adam_params={"x" * 20000: 1})
    assert len((await world.alice.result(request))["error"]) < 2500


def numbered(request: int) -> dict[str, Any]:
    """Return the headers with which a client that retries says which of its requests this is."""
    return {"X-Idempotency-Key": str(request)}


async def test_sessions_without_models_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_EMPTY", 2)
    home = home_with_keys(tmp_path / "home")
    body = {"sdk_version": "0.38.0"}
    async with running_door(home) as world:
        made = [
            (await world.alice.ask("create_session", body, **numbered(n)))["session_id"] for n in range(5)
        ]
        await world.alice.model(made[0])
        for session in made[:4]:
            await world.alice.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        await world.door.models.park_silent(300.0)
        world.door.state.forget_empty()
        kept = [*world.door.state.sessions]
        assert kept == [made[0], made[2], made[3], made[4]]
        await world.alice.ask("create_session", body, **numbered(5))
        assert [key for _, key in world.door.idempotent] == ["4", "5"]
    async with running_door(home, world.daemon) as world:
        assert [*world.door.state.sessions][:4] == kept


async def test_one_owner_has_so_many_samplers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "_MOST_SAMPLERS", 1)
    monkeypatch.setattr(samplers, "_MOST_COPIES", 1)
    name = (await a_sampler(world.alice))["sampling_session_id"]
    body = {"session_id": name.partition(":")[0], "sampling_session_seq_id": 1, "base_model": BASE}
    assert "1 samplers" in (await world.alice.ask("create_sampling_session", body, status=400))["detail"]
    await a_sampler(world.bob)
    await world.alice.ask("join_sampling_session", {"sampling_session_id": name})
    await world.alice.ask("join_sampling_session", {"sampling_session_id": name}, status=400)
    target = {"sampling_session_id": name, "cloned_sampler_id": 1}
    await world.alice.ask("retrieve_futures", {"target": target, "timeout": 0})
    await world.alice.ask("retrieve_futures", {"target": target | {"cloned_sampler_id": 2}}, status=404)


async def test_results_nobody_fetches_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(name: str, wish: Any, waits: Any) -> bytes:
        return b"samples"

    monkeypatch.setattr(world.door.pools, "answer", answer)
    monkeypatch.setattr(sampling, "_MOST_BYTES", 10)
    asked = await a_sampler(world.alice)
    names = [(await world.alice.ask("asample", asked | {"seq_id": seq}))["request_id"] for seq in (1, 2)]
    for name in names:
        sampled = world.door.samples.find(name)
        assert sampled is not None and sampled.task is not None
        await sampled.task
    assert "14 bytes" in (await world.alice.ask("asample", asked | {"seq_id": 3}, status=429))["detail"]
    assert await world.alice.result(names[0]) == b"samples"
    await world.alice.ask("asample", asked | {"seq_id": 3})
    assert await world.alice.result(names[1]) == b"samples"
