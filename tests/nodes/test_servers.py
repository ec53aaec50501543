"""Servers on nodes: reached by tunnels, each with its node's copy of every version."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from lorad.adapters.peft import WEIGHTS
from lorad.engines.base import BASE, AdapterSource, Scorer
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.remote.fleet import Fleet
from lorad.engines.remote.settings import settings_of
from lorad.engines.remote.starts import Directories
from lorad.errors import AdapterRefused, PoolLost, SpecError, StorageError
from lorad.models.directory import linear_shapes, read_config
from lorad.nodes import remote
from lorad.nodes.remote import Node
from lorad.protocol.batch import Sampling
from lorad.protocol.pool_setup import ServerSetup
from tests.conformance.engine_suite import CANARY, complete, prompt
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.fakes.stub_engine import StubDialect, StubEngine
from tests.nodes.kit import LIFE, MODEL, Agents, nodes, setup

shared = pytest.mark.asyncio(loop_scope="module")
SHAPES = linear_shapes(read_config(MODEL))
QUICK, SLOW = Sampling(max_new_tokens=1, stream=False), Sampling(max_new_tokens=20, stream=False)


def setup_of(servers: int) -> ServerSetup:
    return ServerSetup(
        python=sys.executable,
        servers=servers,
        max_rank=16,
        context_length=64,
        targets=tuple(sorted({module.rpartition(".")[2] for module in SHAPES})),
    )


def settings(setup: ServerSetup) -> ServerSettings:
    sizes: dict[str, Any] = {"threads": 1, "memory_fraction": 0.5, "sleep": False}
    return settings_of(setup, model=MODEL, dtype="float32", device="cpu", **sizes)


@asynccontextmanager
async def opened(work: Path, hosts: list[Node], servers: int = 2) -> AsyncIterator[StubEngine]:
    own = setup_of(servers)
    engine = await StubEngine.open(own, settings(own), SHAPES, work=work, hosts=hosts)
    try:
        yield engine
    finally:
        await engine.close()


class World:
    """An engine of three servers on two nodes."""

    def __init__(self, agents: Agents, hosts: list[Node], engine: StubEngine, work: Path) -> None:
        self.agents, self.hosts, self.engine, self.work = agents, hosts, engine, work
        self.servers = engine._fleet.servers
        self._seeds = iter(range(1, 1000))

    async def load(self, name: str) -> str:
        """Load an adapter of its own; returns its digest."""
        adapter = random_adapter(SHAPES, next(self._seeds))
        await self.engine.load(name, AdapterSource(adapter.digest(), adapter=adapter))
        return adapter.digest()

    async def names(self) -> list[str]:
        return [version.name for version in await self.engine.loaded()]

    def copy(self, host: Node, name: str) -> Path:
        return host.directory / "adapters" / name


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One for all tests that leave the nodes alive."""
    work = tmp_path_factory.mktemp("engine")
    async with nodes(work) as (agents, hosts), opened(work, hosts, servers=3) as engine:
        yield World(agents, hosts, engine, work)


@pytest_asyncio.fixture
async def own(tmp_path: Path) -> AsyncIterator[World]:
    """One of a test's own, with a server on each node."""
    async with nodes(tmp_path) as (agents, hosts), opened(tmp_path, hosts) as engine:
        yield World(agents, hosts, engine, tmp_path)


@shared
async def test_servers_are_spread_over_nodes(world: World) -> None:
    assert [str(server) for server in world.servers] == [
        "stub server 0 (h1)",
        "stub server 1 (h1)",
        "stub server 2 (h2)",
    ]
    await until((world.work / "engine-2.log").read_text)  # it is followed from time to time
    assert (world.work / "engine-2.log").read_text().startswith("h2: stub server starts\n")
    for server, host in zip(world.servers, (0, 0, 1), strict=True):
        assert server.process is not None and server.process.pid is not None
        process = psutil.Process(server.process.pid)
        assert process.cwd() == str(world.hosts[host].directory / f"engine-{server.index}")


@shared
async def test_each_server_reads_its_nodes_copy(world: World) -> None:
    digest = await world.load("run@1")
    [held] = await world.engine.loaded()
    assert (held.digest, held.name) == (digest, "run@1")
    for server in world.servers:
        assert await server.holds() == {"run@1": str(world.copy(world.hosts[server.index // 2], "run@1"))}
    said = await world.engine.scores("run@1", CANARY)
    assert len(said) == 3 and len({float(part[0]) for part in said}) == 1
    made = await complete(world.engine, "run@1", [prompt(f"p{i}", [i, 5]) for i in range(6)], QUICK)
    assert len({tokens[0] for tokens, _, _ in made.values()}) == 1
    await world.engine.unload("run@1")
    assert [await server.holds() for server in world.servers] == [{}, {}, {}]
    assert [list((host.directory / "adapters").iterdir()) for host in world.hosts] == [[], []]


@shared
async def test_a_failed_put_changes_nothing_anywhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.load("a@1")

    async def full(name: str, source: Path) -> Path:
        raise StorageError("/x could not be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(world.hosts[1], "put", full)
        with pytest.raises(StorageError, match="h2: /x could not be written"):
            await world.load("a@2")
    assert await world.names() == ["a@1"]
    assert not any(world.copy(host, "a@2").exists() for host in world.hosts)
    await world.load("a@2")
    assert await world.names() == ["a@1", "a@2"]
    for name in ("a@1", "a@2"):
        await world.engine.unload(name)


@shared
async def test_a_failed_load_changes_nothing_anywhere(world: World) -> None:
    put = world.hosts[1].put

    async def emptied(name: str, source: Path) -> Path:
        path = await put(name, source)
        (path / WEIGHTS).unlink()
        return path

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world.hosts[1], "put", emptied)
        with pytest.raises(AdapterRefused, match=r"stub server 2 \(h2\) does not load b@1"):
            await world.load("b@1")
    assert await world.names() == []
    assert [await server.holds() for server in world.servers] == [{}, {}, {}]
    assert not any(world.copy(host, "b@1").exists() for host in world.hosts)


@shared
async def test_a_flipped_byte_is_no_version(world: World) -> None:
    put = world.hosts[1].put

    async def flipped(name: str, source: Path) -> Path:
        path = await put(name, source)
        data = bytearray((path / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (path / WEIGHTS).write_bytes(data)
        return path

    adapter = random_adapter(SHAPES, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world.hosts[1], "put", flipped)
        loaded = await world.engine.load("c@1", AdapterSource(adapter.digest(), adapter=adapter))
    assert loaded.digest == loaded.delivered != adapter.digest()
    assert loaded.delivered == await world.hosts[1].digest(f"adapters/c@1/{WEIGHTS}")
    await world.engine.unload("c@1")


@shared
async def test_an_earlier_version_on_one_node_is_seen(world: World) -> None:
    for name in ("d@1", "d@2"):
        await world.load(name)
    last = world.servers[2]
    await last.dialect.load(last.http, "d@2", world.copy(world.hosts[1], "d@1"))
    assert await world.names() == ["d@1"]
    assert len({float(part[0]) for part in await world.engine.scores("d@2", CANARY)}) == 2
    for name in ("d@1", "d@2"):
        await world.engine.unload(name)


@shared
async def test_a_killed_server_returns_on_its_node(world: World) -> None:
    await world.load("e@1")
    before = await world.engine.score("e@1", CANARY)
    last, seen = world.servers[2], []

    async def check(score: Scorer) -> None:
        seen.append(await score("e@1", CANARY))

    world.engine.on_return(check)
    life = last.life
    assert last.process is not None and last.process.pid is not None
    world.copy(world.hosts[1], "e@1").joinpath(WEIGHTS).write_bytes(b"other")
    os.kill(last.process.pid, signal.SIGKILL)
    await until(lambda: last.life > life and last.state == "up")
    assert len(seen) == 1 and np.array_equal(seen[0], before)
    assert len({float(part[0]) for part in await world.engine.scores("e@1", CANARY)}) == 1
    await world.engine.unload("e@1")


@pytest.mark.system
async def test_a_lost_node_costs_its_servers_alone(own: World) -> None:
    """Samples begin again elsewhere; the servers return on another node."""
    await own.load("run@1")
    prompts = [prompt(f"p{i}", [i, 5]) for i in range(8)]
    expected = await complete(own.engine, "run@1", prompts, QUICK)
    call = asyncio.create_task(complete(own.engine, "run@1", prompts, SLOW))
    await until(lambda: own.servers[1].in_flight)
    own.agents.processes["h2"].kill()
    made = await call
    assert {tokens[0] for tokens, _, _ in made.values()} == {tokens[0] for tokens, _, _ in expected.values()}
    health = await own.engine.health()
    assert health.alive and "1 of 2 servers serve; server 1 is failed: node h2 was lost" in health.detail
    second = await own.load("run@2")
    assert await own.names() == ["run@1", "run@2"]
    async with AsyncExitStack() as stack:
        told = await own.agents.granted("h3", "127.0.0.3")
        node = Node.connected(told, own.agents.credentials, LIFE, setup())
        h3 = await stack.enter_async_context(node)
        own.engine.replace_node(own.hosts[1], h3)
        await until(lambda: own.servers[1].state == "up")
        assert await own.servers[1].holds() == {name: str(own.copy(h3, name)) for name in ("run@1", "run@2")}
        assert await h3.digest(f"adapters/run@2/{WEIGHTS}") == second
        assert len({float(part[0]) for part in await own.engine.scores("run@2", CANARY)}) == 1
        await own.engine.close()


@pytest.mark.system
async def test_the_last_node_is_waited_for(own: World) -> None:
    """As long as patience lasts; then the engine is over."""
    own.engine.expect_nodes(600.0)
    for name in ("h1", "h2"):
        own.agents.processes[name].kill()
    await until(lambda: all(server.state == "failed" for server in own.servers))
    asked = asyncio.create_task(own.engine.loaded())
    assert (await own.engine.health()).alive and not asked.done()
    own.engine.expect_nodes(0.0)
    assert not (await own.engine.health()).alive
    with pytest.raises(PoolLost, match=r"node h\d was lost"):
        await asked


@pytest.mark.system
async def test_a_load_goes_on_without_a_lost_node(own: World) -> None:
    put = own.hosts[1].put

    async def cut(name: str, source: Path) -> Path:
        own.agents.processes["h2"].kill()
        return await put(name, source)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own.hosts[1], "put", cut)
        await own.load("run@1")
    assert await own.names() == ["run@1"] and len(await own.engine.scores(BASE, CANARY)) == 1


@pytest.mark.system
async def test_a_sleeping_node_may_be_lost(own: World) -> None:
    await own.load("run@1")
    await own.load("run@2")
    await own.engine.sleep()
    await own.engine.unload("run@1")
    own.agents.processes["h2"].kill()
    await until(lambda: own.servers[1].state == "failed")
    await own.engine.wake()
    assert await own.names() == ["run@2"] and len(await own.engine.scores("run@2", CANARY)) == 1
    assert [path.name for path in (own.hosts[0].directory / "adapters").iterdir()] == ["run@2"]


@pytest.mark.system
async def test_a_silent_node_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples begin again elsewhere, and a version comes to be there, once the node is given up."""
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.5)
    async with nodes(tmp_path, lease=2.0) as (agents, hosts), opened(tmp_path, hosts) as engine:
        own = World(agents, hosts, engine, tmp_path)
        prompts = [prompt(f"p{i}", [i, 5]) for i in range(8)]
        call = asyncio.create_task(complete(engine, BASE, prompts, SLOW))
        await until(lambda: own.servers[1].in_flight)
        os.kill(hosts[1].granted.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            await own.load("run@1")
            assert len(await call) == 8
        assert hosts[1].lost.done() and await own.names() == ["run@1"]


@pytest.mark.system
async def test_the_last_node_takes_the_engine_along(own: World) -> None:
    for process in own.agents.processes.values():
        process.kill()
    async with asyncio.timeout(20):
        while (await own.engine.health()).alive:  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.02)


async def test_a_node_may_return_under_its_name(tmp_path: Path) -> None:
    """Also while some of its servers are still those of the node that was lost."""
    own, loop = setup_of(2), asyncio.get_running_loop()
    hosts: Any = [SimpleNamespace(name="h1", lost=loop.create_future()) for _ in range(2)]
    hosts[1].lost.set_result("its agent has gone")
    fleet = Fleet(StubDialect(), settings(own), own, Directories(tmp_path, tmp_path), hosts)
    assert fleet.hosts == hosts[:1]
    await fleet.close()


@pytest.mark.system
async def test_another_base_on_a_node_is_refused(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (_, hosts):

        async def other(directory: Path) -> str:
            return "0" * 64

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(hosts[1], "weights", other)
            with pytest.raises(SpecError, match=r"has other weights on h2 \(sha256 000000000000…\)"):
                async with opened(tmp_path, hosts):
                    pass
