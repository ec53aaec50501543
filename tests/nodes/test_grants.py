"""A pool over static nodes: it waits for them, works on them, and is lost with them."""

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from lorad.box import gpu_locks
from lorad.children.identity import start_time
from lorad.errors import PoolLost, SpecError
from lorad.files import write_whole
from lorad.grants import grant as grants
from lorad.grants.fits import checked_nodes
from lorad.grants.grant import Grant, hold_nodes
from lorad.nodes import streams
from lorad.protocol.calls import Nothing
from lorad.protocol.nodes import GRANT, GrantedNode, GrantLine, GrantStatus, LostNode, NodesSetup, StaticNode
from lorad.protocol.pool_setup import RanksSetup, ServerSetup
from lorad.protocol.status import PoolInfo
from tests.kit.pool_kit import OPEN, config_of, generate, learn, publish, running_pool, until
from tests.kit.warm.ranks import interpreter
from tests.nodes.kit import ROOT

TWO = tuple(StaticNode(name=f"h{place}", address=f"127.0.0.{place}") for place in (1, 2))


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def setup(**changes: Any) -> NodesSetup:
    """Two nodes whose agents are forks of the warm process, where there is one."""
    python = interpreter(sys.executable)
    return msgspec.structs.replace(NodesSetup(nodes=2, hosts=TWO, lease=10.0, python=python), **changes)


def status(directory: Path) -> GrantStatus:
    return msgspec.json.decode((directory / GRANT).read_bytes(), type=GrantStatus)


async def test_all_nodes_are_granted_by_name(tmp_path: Path) -> None:
    async with hold_nodes(setup(hosts=TWO[::-1]), "p", tmp_path, tmp_path) as grant:
        assert [node.name for node in grant.hosts] == ["h1", "h2"] and grant.rollout == []
        found = status(tmp_path)
        assert found.state == "granted" and [node.ip for node in found.nodes] == ["127.0.0.1", "127.0.0.2"]
        pids = [node.granted.pid for node in grant.hosts]
    async with asyncio.timeout(20):
        while any(start_time(pid) is not None for pid in pids):  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.02)
    assert not (tmp_path / "granter.json").exists()


async def test_a_grant_is_given_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its process reads, and all that may go to a scheduler from there, has no key of the pool."""
    written: list[bytes] = []

    def kept(path: Path, data: bytes, **how: Any) -> None:
        written.append(data)
        write_whole(path, data, **how)

    monkeypatch.setattr(grants, "write_whole", kept)
    with pytest.raises(SpecError, match="are asked for"):
        await _take(setup(nodes=3), tmp_path)
    request, *_ = (data for data in written if b"BEGIN CERTIFICATE" in data)
    assert not [data for data in written if b"PRIVATE KEY" in data]
    assert {*json.loads(request)} == {"setup", "life", "socket", "certificate", "agent"}


async def test_nodes_named_first_are_taken(tmp_path: Path) -> None:
    third = StaticNode(name="h3", address="127.0.0.3")
    async with hold_nodes(setup(hosts=(third, *TWO)), "p", tmp_path, tmp_path) as grant:
        assert [node.name for node in grant.hosts] == ["h1", "h3"]


async def test_too_few_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"3 nodes are asked for, but cluster\.nodes has 2") as refused:
        async with hold_nodes(setup(nodes=3), "p", tmp_path, tmp_path):
            pass
    assert "Name more nodes there" in refused.value.hint and status(tmp_path).state == "refused"


async def test_last_words_are_read_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that refuses has ended before its line is read."""

    def late(path: Path, called: Callable[..., Awaitable[None]], limit: int) -> Any:
        async def read(*ends: Any) -> None:
            await asyncio.sleep(0.5)
            await called(*ends)

        return streams.listening(path, read, limit)

    monkeypatch.setattr(grants, "listening", late)
    monkeypatch.setattr(grants, "_LAST_WORDS_SECONDS", 30.0)
    with pytest.raises(SpecError, match="3 nodes are asked for"):
        await _take(setup(nodes=3), tmp_path)


async def test_a_missing_node_is_waited_for(tmp_path: Path) -> None:
    broken = StaticNode(name="h2", address="127.0.0.2", command=("/no/such/ssh", "h2"))
    waiting = asyncio.create_task(_take(setup(hosts=(TWO[0], broken)), tmp_path))
    async with asyncio.timeout(30):
        while not (tmp_path / GRANT).exists() or not status(tmp_path).words:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    found = status(tmp_path)
    assert found.state == "asked" and "1 of 2 nodes are free; h2: " in found.words
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not (tmp_path / "granter.json").exists()


async def _take(setup: NodesSetup, directory: Path) -> None:
    async with hold_nodes(setup, "p", directory, directory):
        pass


@pytest.mark.system
@pytest.mark.parametrize("victim", ["agent", "grant"])
async def test_a_lost_grant_loses_its_nodes(tmp_path: Path, victim: str) -> None:
    async with hold_nodes(setup(), "p", tmp_path, tmp_path) as grant:
        lost = grant.hosts[1]
        guard = json.loads((tmp_path / "granter.json").read_bytes())["guard_pid"]
        (process,) = psutil.Process(guard).children()
        os.kill(process.pid if victim == "grant" else lost.granted.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert await lost.lost
            with pytest.raises(PoolLost, match="was lost with its node h2"):
                await lost.digest("x")
            while status(tmp_path).state != "lost":  # noqa: ASYNC110 (it is polled)
                await asyncio.sleep(0.02)
        words = status(tmp_path).words
        assert "h2: its agent exited" in words or victim == "grant"


_NVML = """
import os
class NVMLError(Exception): pass
class Memory: total = int(os.environ["GIB"]) << 30
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return os.environ["GPU"]
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetMemoryInfo(handle): return Memory
"""


@pytest.fixture
def unlike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StaticNode, ...]]:
    """Nodes with stand-ins for GPUs, of 24 and of 80 GiB; the UUIDs of these end so. What agents import is
    theirs: they are no forks.
    """
    (tmp_path / "pynvml.py").write_text(_NVML)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    gpus = {gib: f"GPU-{uuid.uuid4()}-{gib}" for gib in (24, 80)}
    yield tuple(
        msgspec.structs.replace(node, devices=1, command=("env", f"GIB={gib}", f"GPU={gpu}"))
        for node, (gib, gpu) in zip(TWO, gpus.items(), strict=True)
    )
    for gpu in gpus.values():
        (gpu_locks.DIRECTORY / f"{gpu}.lock").unlink(missing_ok=True)


@pytest.mark.system
async def test_a_node_too_small_is_passed_by(tmp_path: Path, unlike: tuple[StaticNode, ...]) -> None:
    asked = setup(nodes=1, devices=1, hosts=unlike, memory=32 << 30, python="")
    async with hold_nodes(asked, "p", tmp_path, tmp_path) as grant:
        (node,) = grant.hosts
        assert node.name == "h2" and node.granted.memory == (80 << 30,)


@pytest.mark.system
async def test_too_few_large_nodes_are_refused(tmp_path: Path, unlike: tuple[StaticNode, ...]) -> None:
    words = r"1 of 2 nodes are free; h1: GPU .*-24 has 24\.0 GiB, and the pool needs 32\.0 GiB of each"
    with pytest.raises(SpecError, match=words):
        await _take(setup(devices=1, hosts=unlike, memory=32 << 30, python=""), tmp_path)
    assert status(tmp_path).state == "refused"


def test_what_ray_grants_is_large_enough(tmp_path: Path) -> None:
    told = GrantedNode(
        node="h1", ip="", port=1, certificate="", boot_id="", directory="", devices=("GPU-1", "GPU-2"),
        pid=1, lorad="", uid=os.getuid(), memory=(80 << 30, 24 << 30),
    )  # fmt: skip
    Grant(setup(kind="ray", devices=2, memory=24 << 30), "p@1", tmp_path, tmp_path)._check(told)
    with pytest.raises(SpecError, match=r"h1: GPU GPU-2 has 24\.0 GiB, and the pool needs 32\.0 GiB"):
        Grant(setup(kind="ray", devices=2, memory=32 << 30), "p@1", tmp_path, tmp_path)._check(told)


@pytest.mark.system
async def test_nodes_asked_to_end_are_named(tmp_path: Path) -> None:
    async with hold_nodes(setup(), "p", tmp_path, tmp_path) as grant:
        os.kill(grant.hosts[1].granted.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            while not status(tmp_path).leaving:  # noqa: ASYNC110 (it is polled)
                await asyncio.sleep(0.02)
        found = status(tmp_path)
        assert (found.state, found.words, found.leaving) == ("granted", "h2 was asked to end", ("h2",))
        assert await grant.hosts[1].digest("absent") == ""


@pytest.mark.system
async def test_a_node_outlives_ray_that_stops(tmp_path: Path) -> None:
    """Where Ray was asked to go the agent is asked to leave; where Ray was lost it is not."""
    async with hold_nodes(setup(), "p", tmp_path, tmp_path) as grant:
        lost, stays = grant.hosts
        lines: asyncio.Queue[GrantLine | None] = asyncio.Queue()
        for line in (LostNode("h2", "Ray lost it", is_asked=True), LostNode("h1", "Ray lost it"), None):
            lines.put_nowait(line)
        await grant._follow(lines, lambda _: pytest.fail("nothing was granted"))
        assert lost.lost.done() and stays.leaving.done() and not stays.lost.done()
        assert await stays.digest("absent") == "" and status(tmp_path).leaving == ("h2",)


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_lost_rollout_node_is_given_again(tmp_path: Path, number: int) -> None:
    async with hold_nodes(setup(nodes=1, rollout_nodes=1), "p", tmp_path, tmp_path) as grant:
        (lost,), (trains,) = grant.rollout, grant.hosts
        os.kill(lost.granted.pid, number)
        async with asyncio.timeout(30):
            gone, node = await grant.returned.get()
        assert gone is lost and node.name == "h2" and node.granted.pid != lost.granted.pid
        assert grant.rollout == [node] and grant.hosts == [trains] and not trains.lost.done()
        assert await node.digest("absent") == "" == await trains.digest("absent")
        found = status(tmp_path)
        assert found.state == "granted" and [each.pid for each in found.nodes][1] == node.granted.pid


@pytest.mark.system
def test_a_pool_trains_over_nodes(tmp_path: Path) -> None:
    ranks = RanksSetup(dp=2, python=interpreter(sys.executable))
    changes = {"nodes": setup(), "ranks": ranks, "trainer": "fsdp", "mode": "resident"}
    with running_pool(tmp_path, **changes) as running, running.connect("a") as driver:
        driver.call("open", OPEN)
        learn(driver)
        publish(driver, tmp_path / "versions", 1)
        assert generate(driver, "a@1")
        info: PoolInfo = driver.call("hello", Nothing())
        first, second = info.nodes
        assert (first.node, second.node) == ("h1", "h2") and first.boot_id == second.boot_id
        assert len(first.software) == 64
        os.kill(status(tmp_path).nodes[1].pid, signal.SIGKILL)
        with pytest.raises(PoolLost, match="was lost with its node h2"):
            learn(driver)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the builtin trainer is not made of ranks"),
        ({"mode": "split"}, "split is for servers on nodes of their own"),
        ({"mode": "split", "nodes": setup(rollout_nodes=1)}, "the builtin engine has no servers"),
        (
            {"ranks": RanksSetup(), "mode": "resident", "device": "cuda:0"},
            "the builtin engine would need a GPU of this machine",
        ),
    ],
)
def test_what_nodes_cannot_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        checked_nodes(config_of(Path(), **{"nodes": setup(), **changes}))


def test_split_without_nodes_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(SpecError, match="split is for servers on nodes of their own")
    with refused, running_pool(tmp_path, mode="split"):
        pass


@pytest.mark.system
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2])
def test_split_servers_return_on_another_node(tmp_path: Path, count: int) -> None:
    """The pool goes on meanwhile, also where it has no other server."""
    mark = tmp_path / "began"
    slow = ("sh", "-c", f'test -e {mark} && sleep 2; touch {mark}; exec "$@"', "sh")  # at the second time
    hosts = (*TWO, StaticNode(name="h3", address="127.0.0.3"))[: 1 + count]
    hosts = (*hosts[:-1], msgspec.structs.replace(hosts[-1], command=slow))
    nodes = setup(nodes=1, rollout_nodes=count, hosts=hosts)
    server = ServerSetup(
        python=sys.executable, servers=count, max_rank=16, targets=("q_proj",), context_length=64
    )
    changes = {
        "mode": "split",
        "trainer": "fsdp",
        "ranks": RanksSetup(python=interpreter(sys.executable)),
        "server": server,
        "engine_class": "tests.kit.fakes.stub_engine:StubEngine",
    }
    with running_pool(tmp_path, nodes=nodes, **changes) as running:
        servers = running.pool.engine._fleet.servers  # type: ignore[attr-defined]
        assert [each.host.name for each in servers] == ["h2", "h3"][:count]
        lost = status(tmp_path).nodes[-1].pid
        os.kill(lost, signal.SIGKILL)
        until(lambda: servers[-1].state == "failed")
        assert not running.pool.engine._fleet.is_over  # type: ignore[attr-defined]
        until(lambda: servers[-1].state == "up")
        assert servers[-1].host.granted.pid != lost and len(status(tmp_path).nodes) == 1 + count
