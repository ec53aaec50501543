"""Real servers that die, hang and come back, one of them or one of several."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from lorad.engines.base import BASE, AdapterSource, Engine, Scorer
from lorad.engines.remote import server as servers
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.server import Server
from lorad.errors import AdapterRefused, AttestationFailed, EngineGone, PoolLost
from lorad.protocol.batch import Sampling
from tests.conformance.engine_suite import CANARY, LONG, SHORT, complete, prompt
from tests.engines.real.places import busy, opened, python_of
from tests.kit.fakes.random_adapters import Shapes, random_adapter

WHOLE = Sampling(max_new_tokens=100, stream=False)
RESTART_SECONDS = 1800.0  # a server takes a minute of processor, of which a busy machine gives little


async def load(engine: Engine, name: str, shapes: Shapes, seed: int) -> None:
    adapter = random_adapter(shapes, seed)
    await engine.load(name, AdapterSource(adapter.digest(), adapter=adapter))


def everybody(server: Server) -> list[psutil.Process]:
    assert server.process is not None and server.process.pid is not None
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


# on SGLang, CI kills the server of a run: tests/trainers/real/test_matrix
@pytest.mark.parametrize("kind", [pytest.param("sglang", marks=pytest.mark.long), "vllm"], indirect=True)
async def test_killed_server_returns_and_loses_no_sample(
    engine: Engine, server: RemoteEngine, shapes: Shapes
) -> None:
    await load(engine, "run@1", shapes, 1)
    before = [await engine.score(version, CANARY) for version in (BASE, "run@1")]
    expected = await complete(engine, "run@1", [prompt(seeds=range(8))], WHOLE)
    seen: list[np.ndarray] = []

    async def check(score: Scorer) -> None:
        assert server._fleet.serving == [] and not whole.done()
        seen.append(await score(BASE, CANARY))

    engine.on_return(check)
    stream = engine.generate("streamed", "run@1", [prompt(seeds=range(2))], LONG)
    await anext(stream)
    whole = asyncio.create_task(complete(engine, "run@1", [prompt(seeds=range(8))], WHOLE))
    old = everybody(server._fleet.servers[0])
    os.kill(old[0].pid, signal.SIGKILL)
    with pytest.raises(PoolLost, match="lost"):  # what was passed on cannot be taken back
        async for _ in stream:
            pass
    async with asyncio.timeout(RESTART_SECONDS):
        again = await whole
    assert {key: made[0] for key, made in again.items()} == {key: made[0] for key, made in expected.items()}
    assert not psutil.wait_procs(old, timeout=5)[1], "processes of the old life are left"
    assert len(seen) == 1 and np.abs(seen[0] - before[0]).max() < 1e-4
    assert [version.name for version in await engine.loaded()] == ["run@1"]
    assert np.abs(await engine.score("run@1", CANARY) - before[1]).max() < 1e-4


@pytest_asyncio.fixture(loop_scope="session")
async def pair(tmp_path: Path) -> AsyncIterator[RemoteEngine]:
    """Two servers of one engine; of the kind that starts faster."""
    if not python_of("sglang"):
        pytest.skip("needs SGLang: `make test-engines` installs it")
    async with opened("sglang", tmp_path, servers=2) as engine:
        yield engine


@pytest.mark.long
async def test_two_servers_are_one_engine(
    pair: RemoteEngine, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair._fleet.servers
    await load(pair, "run@1", shapes, 1)
    alone = await pair.scores("run@1", CANARY)
    assert len(alone) == 2 and np.abs(alone[0] - alone[1]).max() < 1e-4
    await publish_reaches_all_or_none(pair, shapes)
    expected = await complete(
        pair, "run@1", [prompt(f"p{i}", [5, 9, i + 3], range(4)) for i in range(8)], WHOLE
    )
    await prompts_keep_to_a_server(pair)
    await one_dies_and_the_other_goes_on(pair, expected)
    async with asyncio.timeout(RESTART_SECONDS):
        while second.state != "failed":  # noqa: ASYNC110 (of the check on its return)
            await asyncio.sleep(0.05)
    health = await pair.health()
    assert health.alive and "server 1 is failed: not as attested" in health.detail
    assert first.state == "up" and len(await pair.scores(BASE, CANARY)) == 1


async def publish_reaches_all_or_none(pair: RemoteEngine, shapes: Shapes) -> None:
    first, second = pair._fleet.servers
    stranger = next(iter(pair._versions.table.values())).directory
    assert stranger is not None
    await second.dialect.load(second.http, "run@2", stranger)
    with pytest.raises(AdapterRefused, match="server 1"):
        await load(pair, "run@2", shapes, 2)
    assert "run@2" not in await first.holds()
    assert [version.name for version in await pair.loaded()] == ["run@1"]
    await load(pair, "run@2", shapes, 2)
    assert len(await pair.scores("run@2", CANARY)) == 2


async def prompts_keep_to_a_server(pair: RemoteEngine) -> None:
    picks = {(await pair._fleet.pick(np.array([5, 9, i], np.int32))).index for i in range(32)}
    assert picks == {0, 1}
    for i in range(8):
        again = {(await pair._fleet.pick(np.array([5, 9, i], np.int32))).index for _ in range(5)}
        assert len(again) == 1


async def one_dies_and_the_other_goes_on(pair: RemoteEngine, expected: object) -> None:
    first, second = pair._fleet.servers

    async def check(_: Scorer) -> None:
        raise AttestationFailed("not as attested")

    pair.on_return(check)
    work = [prompt(f"p{i}", [5, 9, i + 3], range(4)) for i in range(8)]
    call = asyncio.create_task(complete(pair, "run@1", work, WHOLE))
    while not second.in_flight:
        assert not call.done()
        await asyncio.sleep(0.005)
    os.kill(everybody(second)[0].pid, signal.SIGKILL)
    assert tokens(await call) == tokens(expected)
    assert second.state != "up" and first.state == "up"


def tokens(made: object) -> dict[object, list[int]]:
    assert isinstance(made, dict)
    return {key: sample[0] for key, sample in made.items()}


@pytest.mark.long
async def test_hanging_server_is_replaced(
    engine: Engine, server: RemoteEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(servers, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(servers, "ANSWER_SECONDS", 2.0)
    one = server._fleet.servers[0]
    expected = tokens(await complete(engine, BASE, [prompt()], SHORT))
    stopped = everybody(one)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    call = asyncio.create_task(complete(engine, BASE, [prompt()], Sampling(max_new_tokens=8, stream=False)))
    async with asyncio.timeout(RESTART_SECONDS):
        while one.state == "up":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        monkeypatch.undo()
        assert tokens(await call) == expected
    assert not psutil.wait_procs(stopped, timeout=5)[1]


@pytest.mark.long
async def test_publish_outlives_the_only_server(engine: Engine, server: RemoteEngine) -> None:
    """What is asked inside `settled` fails at once, and `settled` waits for the server."""
    one = server._fleet.servers[0]
    os.kill(everybody(one)[0].pid, signal.SIGKILL)
    with pytest.raises(EngineGone):
        async with engine.settled():
            while True:
                await engine.loaded()
    assert server._fleet.serving == [], "the next try would meet the dead server again"
    async with asyncio.timeout(RESTART_SECONDS), engine.settled():
        assert len(await engine.scores(BASE, CANARY)) == 1


WORKERS = {"sglang": "sglang::scheduler", "vllm": "VLLM::EngineCore"}


@pytest.mark.long
async def test_a_server_whose_worker_is_killed_is_replaced(
    engine: Engine, server: RemoteEngine, kind: str, shapes: Shapes
) -> None:
    """The HTTP side of such a server survives for a while, and answers with errors."""
    await load(engine, "run@1", shapes, 1)
    expected = tokens(await complete(engine, "run@1", [prompt(seeds=range(8))], WHOLE))
    call = asyncio.create_task(complete(engine, "run@1", [prompt(seeds=range(8))], WHOLE))
    await busy(server, call)
    people = everybody(server._fleet.servers[0])
    os.kill(next(p.pid for p in people if WORKERS[kind] in " ".join(p.cmdline())), signal.SIGKILL)
    async with asyncio.timeout(RESTART_SECONDS):
        assert tokens(await call) == expected
