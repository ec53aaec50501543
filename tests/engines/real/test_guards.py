"""What kills or misleads the real servers, and that it does not happen behind the engine protocol."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import WEIGHTS, write_peft
from lorad.adapters.targets import match_modules
from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.engines.remote import server as servers
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.http import NotFinite, ServerRefused
from lorad.engines.remote.server import Server
from lorad.engines.remote.transport import ServerTransport
from lorad.errors import AdapterRefused, LoradError, NotFound
from lorad.protocol.batch import Sampling
from tests.conformance.engine_suite import CANARY, LONG, SHORT, complete, prompt
from tests.engines.real.places import TINY, busy
from tests.kit.fakes.random_adapters import Shapes, partial, random_adapter

PAUSE = {"sglang": ("/pause_generation", {"mode": "in_place"}), "vllm": ("/pause?mode=keep", None)}
GO_ON: dict[str, tuple[str, object]] = {"sglang": ("/continue_generation", {}), "vllm": ("/resume", None)}


def the(server: RemoteEngine) -> Server:
    return server._fleet.servers[0]


async def load(engine: Engine, name: str, shapes: Shapes, seed: int, rank: int = 4) -> None:
    adapter = random_adapter(shapes, seed, rank)
    await engine.load(name, AdapterSource(adapter.digest(), adapter=adapter))


@pytest_asyncio.fixture(loop_scope="session")
async def paused(server: RemoteEngine, kind: str) -> AsyncIterator[asyncio.Event]:
    """Stop the server between two tokens, until the event is set."""
    go_on = asyncio.Event()
    path, body = PAUSE[kind]
    await the(server).http.post(path, body)

    async def later() -> None:
        await go_on.wait()
        await the(server).http.post(GO_ON[kind][0], GO_ON[kind][1])

    task = asyncio.create_task(later())
    yield go_on
    go_on.set()
    await task


async def test_rank_above_the_servers_limit_is_refused(engine: Engine, shapes: Shapes) -> None:
    with pytest.raises(AdapterRefused, match="rank 32 exceeds 16"):
        await load(engine, "run@1", shapes, 1, rank=32)


@pytest.mark.parametrize("fault", ["truncated", "missing", "garbled"])
async def test_files_that_are_not_whole_are_refused(
    engine: Engine, shapes: Shapes, tmp_path: Path, fault: str
) -> None:
    adapter = random_adapter(shapes, 1)
    write_peft(adapter, tmp_path, str(TINY))
    path = tmp_path / WEIGHTS
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "garbled":
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    else:
        path.unlink()
    with pytest.raises(AdapterRefused):
        await engine.load("run@1", AdapterSource(adapter.digest(), directory=tmp_path))
    assert list(await engine.loaded()) == []


async def test_what_the_server_itself_refuses_changes_nothing(
    engine: Engine, server: RemoteEngine, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(engine, "run@1", shapes, 1)
    before = await engine.score("run@1", CANARY)
    put = ServerTransport.put

    def torn(self: ServerTransport, name: str, adapter: object) -> Path:
        directory = put(self, name, adapter)  # type: ignore[arg-type]
        (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:50])
        return directory

    monkeypatch.setattr(ServerTransport, "put", torn)
    with pytest.raises(AdapterRefused, match="does not load"):
        await load(engine, "run@2", shapes, 2)
    monkeypatch.undo()
    assert [version.name for version in await engine.loaded()] == ["run@1"]
    assert np.abs(before - await engine.score("run@1", CANARY)).max() < 1e-4
    await load(engine, "run@2", shapes, 2)


async def test_form_changed_in_transit_has_another_digest(
    engine: Engine, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = partial(random_adapter(shapes, 1), match_modules(shapes, "q_proj"), rslora=True)
    source, put = AdapterSource(adapter.digest(), adapter=adapter), ServerTransport.put
    whole = await engine.load("run@1", source)
    assert whole.digest == adapter.digest() and whole.delivered

    def changed(self: ServerTransport, name: str, form: Adapter) -> Path:
        path = put(self, name, form) / WEIGHTS
        data = bytearray(path.read_bytes())
        data[-4] ^= 1  # the last bit of the last number
        path.write_bytes(data)
        return path.parent

    monkeypatch.setattr(ServerTransport, "put", changed)
    loaded = await engine.load("run@2", source)
    assert loaded.digest == loaded.delivered not in (whole.digest, whole.delivered)


async def test_an_unload_is_final(engine: Engine, server: RemoteEngine, shapes: Shapes, kind: str) -> None:
    await load(engine, "run@1", shapes, 1)
    held = next(iter(server._versions.table.values()))
    assert held.directory is not None and held.directory.is_dir()
    await engine.unload("run@1")
    assert not held.directory.exists()
    with pytest.raises(NotFound):
        await complete(engine, "run@1", [prompt()], SHORT)
    with pytest.raises(ServerRefused):  # SGLang would load it again from the path that it remembers
        async for _ in the(server).dialect.sample(the(server).http, "r.", held.server_name, [5, 9], 1, SHORT):
            pass


async def test_cached_prefixes_belong_to_one_version(engine: Engine, shapes: Shapes) -> None:
    long_prompt = prompt(tokens=[5 + i % 40 for i in range(200)])
    for number in (1, 2):
        await load(engine, f"run@{number}", shapes, number)
    fresh = await complete(engine, "run@2", [long_prompt], SHORT)
    await engine.unload("run@2")
    await complete(engine, "run@1", [long_prompt], SHORT)
    await engine.unload("run@1")
    await load(engine, "run@3", shapes, 2)
    again = await complete(engine, "run@3", [long_prompt], SHORT)
    assert again["p", 0][0] == fresh["p", 0][0]
    assert np.allclose(again["p", 0][1], fresh["p", 0][1], atol=1e-4)


async def test_more_versions_than_slots_serve_correctly(engine: Engine, shapes: Shapes) -> None:
    names = [f"run@{number}" for number in range(9)]
    for seed, name in enumerate(names):
        await load(engine, name, shapes, seed)
    alone = [await engine.score(name, CANARY) for name in names]
    together = await asyncio.gather(*(engine.score(name, CANARY) for name in reversed(names)))
    for one, other in zip(alone, reversed(together), strict=True):
        assert np.abs(one - other).max() < 1e-4


async def test_unload_on_a_paused_server_blocks_no_load(
    engine: Engine, server: RemoteEngine, shapes: Shapes, paused: asyncio.Event
) -> None:
    await load(engine, "run@1", shapes, 1)
    call = asyncio.create_task(
        complete(engine, "run@1", [prompt(seeds=range(2))], Sampling(20, stream=False))
    )
    await busy(server, call)
    unload = asyncio.create_task(engine.unload("run@1"))
    async with asyncio.timeout(30):
        await load(engine, "run@2", shapes, 2)
    assert not unload.done() and not call.done()
    paused.set()
    assert len(await call) == 2
    await unload


async def test_paused_server_with_work_is_alive(
    engine: Engine, server: RemoteEngine, paused: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = asyncio.create_task(complete(engine, BASE, [prompt()], Sampling(20, stream=False)))
    await busy(server, call)
    monkeypatch.setattr(servers, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(servers, "SILENT_SECONDS", 0.1)
    hangs = asyncio.create_task(the(server)._hangs())
    done, _ = await asyncio.wait([hangs], timeout=2.0)
    hangs.cancel()
    assert not done and (await engine.health()).alive
    paused.set()
    await call


async def test_a_load_that_comes_too_late_is_undone(
    engine: Engine, server: RemoteEngine, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LOAD_SECONDS", 0.5)
    process = the(server).process
    assert process is not None and process.pid is not None
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in everybody:
        os.kill(one.pid, signal.SIGSTOP)
    try:
        with pytest.raises(LoradError, match="did not answer"):
            await load(engine, "run@1", shapes, 1)
    finally:
        for one in everybody:
            os.kill(one.pid, signal.SIGCONT)
    monkeypatch.undo()
    async with asyncio.timeout(60):
        while await the(server).holds() or (await engine.loaded()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    with pytest.raises(NotFound):
        await engine.score("run@1", CANARY)
    await load(engine, "run@1", shapes, 1)


async def test_sleep_waits_for_requests_in_flight(engine: Engine, server: RemoteEngine) -> None:
    call = asyncio.create_task(complete(engine, BASE, [prompt(seeds=range(4))], LONG))
    await busy(server, call)
    await engine.sleep()
    assert call.done()
    late = asyncio.create_task(complete(engine, BASE, [prompt()], SHORT))
    await asyncio.sleep(0.2)
    assert not late.done()
    await engine.wake()
    assert all(finish == "length" for _, _, finish in (await call).values())
    assert (await late)["p", 0][2] == "length"


async def test_aborted_group_leaves_nothing_running_or_loaded(
    engine: Engine, server: RemoteEngine, shapes: Shapes
) -> None:
    await load(engine, "run@1", shapes, 1)
    chunks = engine.generate("doomed", "run@1", [prompt(seeds=range(16))], LONG)
    await anext(chunks)
    await engine.abort("doomed")
    finishes = [chunk.finish async for chunk in chunks if chunk.finish]
    assert set(finishes) <= {"abort", "length"} and len(finishes) == 16
    async with asyncio.timeout(10):
        await engine.unload("run@1")
    await the(server).wait_until_quiet()


@pytest.mark.long
async def test_nonfinite_answer_restarts_the_server(
    engine: Engine, server: RemoteEngine, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one version's NaN leaves in its memory would reach others."""
    before = await engine.score(BASE, CANARY)
    adapter = random_adapter(shapes, 1)
    tensors = {name: np.full_like(t, np.nan) for name, t in adapter.tensors.items()}
    monkeypatch.setattr("lorad.engines.remote.holdings.receive", lambda source, *_: source.adapter)
    broken = type(adapter)(adapter.config, tensors)
    await engine.load("run@1", AdapterSource(broken.digest(), adapter=broken))
    life = the(server).life
    with pytest.raises(NotFinite):
        await complete(engine, "run@1", [prompt(seeds=range(4))], Sampling(max_new_tokens=8, stream=False))
    assert broken.digest() in server._not_finite
    await engine.unload("run@1")
    for _ in range(20):
        assert np.abs(before - await engine.score(BASE, CANARY)).max() < 1e-4
    assert the(server).life - life == 2
