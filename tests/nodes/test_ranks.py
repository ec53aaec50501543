"""A trainer whose ranks are on two nodes answers as one of this machine does."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from lorad.children.identity import start_time
from lorad.errors import Conflict, NotFound, PoolLost, SpecError, StorageError
from lorad.nodes.remote import Node
from lorad.trainers.base import Policy
from lorad.trainers.ranks.remote import RemoteTrainer
from tests.kit.fakes.rank_kit import LOSS, SPEC, WAITS, batch, targets
from tests.kit.warm.ranks import interpreter
from tests.nodes.kit import Agents, nodes, tiny_trainer

shared = pytest.mark.asyncio(loop_scope="module")


async def forked(root: Path, hosts: Sequence[Node], **changes: Any) -> RemoteTrainer:
    """Ranks that are forks of the warm process, where there is one."""
    return await tiny_trainer(root, hosts, python=interpreter(sys.executable), **changes)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def over(root: Path) -> AsyncIterator[tuple[RemoteTrainer, list[Node]]]:
    async with nodes(root) as (_, hosts):
        trainer = await forked(root, hosts)
        yield trainer, hosts
        await trainer.shut_down()


@pytest.fixture
def trainer(over: tuple[RemoteTrainer, list[Node]]) -> RemoteTrainer:
    return over[0]


@pytest.mark.system
@shared
async def test_every_call_reaches_both_nodes(trainer: RemoteTrainer, tmp_path: Path) -> None:
    await trainer.open("a", SPEC)
    await trainer.forward_backward("a", batch(), targets(batch()), LOSS, 16)
    assert (await trainer.optim_step("a", 0.1, 1.0)).applied
    adapter = await trainer.export("a")
    assert "adapter_model.safetensors" in await trainer.save("a", tmp_path)
    await trainer.forward_backward("a", batch(), targets(batch()), LOSS, 16)
    await trainer.optim_step("a", 0.1, 1.0)
    assert (await trainer.export("a")).digest() != adapter.digest()
    await trainer.load("a", tmp_path)
    assert (await trainer.export("a")).digest() == adapter.digest()
    await trainer.close("a")


@shared
async def test_refusals_travel_from_every_node(trainer: RemoteTrainer, tmp_path: Path) -> None:
    await trainer.open("b", SPEC)
    with pytest.raises(Conflict, match="slot b is open already") as conflict:
        await trainer.open("b", SPEC)
    assert conflict.value.hint
    with pytest.raises(NotFound, match="no slot c is open"):
        await trainer.optim_step("c", 0.1, 1.0)
    with pytest.raises(StorageError, match=r"absent.*No such file"):
        await trainer.save("b", tmp_path / "absent")
    with pytest.raises(OSError, match="absent"):
        await trainer.load("b", tmp_path / "absent")
    await trainer.close("b")
    assert (await trainer.health()).alive and trainer.slots() == ()


@shared
async def test_only_home_writes_directories_of_runs(
    over: tuple[RemoteTrainer, list[Node]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks write and read in their nodes' own directories, whose files the pool fetches and puts."""
    trainer, hosts = over

    async def full(*_: object) -> None:
        raise StorageError("no space left")

    await trainer.open("d", SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(hosts[0], "fetch", full)
        with pytest.raises(StorageError, match="no space left"):
            await trainer.save("d", tmp_path)
    assert os.listdir(tmp_path) == []
    await trainer.save("d", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(hosts[1], "put", full)
        with pytest.raises(StorageError, match="no space left"):
            await trainer.load("d", tmp_path)
        with pytest.raises(StorageError, match="no space left"):
            await trainer.open("e", msgspec.structs.replace(SPEC, source=tmp_path))
    await trainer.load("d", tmp_path)
    await trainer.close("d")
    assert [path for host in hosts for path in host.directory.glob("trainer/in-*")] == []


@shared
async def test_log_lines_name_their_node(trainer: RemoteTrainer, root: Path) -> None:
    await trainer.open("c", SPEC)
    with pytest.raises(Conflict):
        await trainer.open("c", SPEC)
    await trainer.close("c")
    async with asyncio.timeout(20):
        while "h2: rank 1 refused Open" not in (root / "trainer.log").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def ranks_of(agents: Agents, name: str) -> dict[str, int]:
    """Pids of an agent, its guard, its launcher and its rank."""
    agent = psutil.Process(agents.processes[name].pid)
    (guard,) = agent.children()
    (launcher,) = guard.children()
    (rank,) = launcher.children()
    return {"agent": agent.pid, "guard": guard.pid, "launcher": launcher.pid, "rank": rank.pid}


async def gone(*pids: int) -> None:
    async with asyncio.timeout(15):
        while any(start_time(pid) is not None for pid in pids):  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.02)


async def waits(root: Path) -> None:
    """Until both ranks are amid a call that waits."""
    async with asyncio.timeout(60):
        while not all((root / f"rank-{rank}.waits").exists() for rank in (0, 1)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.system
@pytest.mark.parametrize(
    "victim",
    ["rank", *(pytest.param(name, marks=pytest.mark.long) for name in ("launcher", "guard")), "agent"],
)
async def test_a_death_on_one_node_ends_all(tmp_path: Path, victim: str) -> None:
    async with nodes(tmp_path) as (agents, hosts):
        trainer = await forked(tmp_path, hosts)
        first, second = ranks_of(agents, "h1"), ranks_of(agents, "h2")
        waiting = asyncio.create_task(trainer.logprobs(Policy(), batch(WAITS)))
        await waits(tmp_path)
        os.kill(second[victim], signal.SIGKILL)
        with pytest.raises(PoolLost, match=r"(killed.* h2|lost with its node h2)|killed with its guard|KILL"):
            async with asyncio.timeout(20):
                await waiting
        assert not (await trainer.health()).alive
        await gone(first["rank"], first["launcher"], second["rank"], second["launcher"])
        await trainer.shut_down()


@pytest.mark.system
async def test_a_hung_rank_is_found_by_its_shadow(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (agents, hosts):
        trainer = await tiny_trainer(tmp_path, hosts, hang=6.0)
        waiting = asyncio.create_task(trainer.logprobs(Policy(), batch(WAITS)))
        await waits(tmp_path)
        pids = ranks_of(agents, "h2")
        os.kill(pids["rank"], signal.SIGSTOP)
        with pytest.raises(PoolLost, match=r"rank 1 was hung: no heartbeat for \d+ s"):
            async with asyncio.timeout(60):
                await waiting
        await gone(pids["rank"])
        assert f"h2: stacks of rank 1 (pid {pids['rank']}, stopped)" in (tmp_path / "trainer.log").read_text()
        await trainer.shut_down()


async def test_ranks_need_a_whole_number_a_node(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (_, hosts):
        with pytest.raises(SpecError, match="is 3 ranks, which 2 nodes cannot share equally"):
            await tiny_trainer(tmp_path, hosts, dp=3)
        with pytest.raises(SpecError, match="tp is 2, but there are 1 ranks on a node"):
            await tiny_trainer(tmp_path, hosts, dp=1, tp=2)


@pytest.mark.system
async def test_other_weights_on_one_node_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(tmp_path) as (_, hosts):

        async def other(*_: object) -> str:
            return "0" * 64

        monkeypatch.setattr(hosts[1], "weights", other)
        with pytest.raises(SpecError, match="has other weights on h2"):
            await tiny_trainer(tmp_path, hosts)


@pytest.mark.system
async def test_settings_are_refused_from_a_node(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (agents, hosts):
        with pytest.raises(SpecError, match="colour is none of this backend's") as refused:
            await forked(tmp_path, hosts, args={"colour": "red"})
        assert refused.value.hint == "Leave it out."
        with pytest.raises(PoolLost, match=r"exited with code 127.*h\d: lorad: cannot start /no/python"):
            await tiny_trainer(tmp_path, hosts, python="/no/python")
        pids = [agents.processes[name].pid for name in ("h1", "h2")]
        assert all(not psutil.Process(pid).children() for pid in pids)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.system
@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
async def test_ranks_meet_over_ipv6(tmp_path: Path) -> None:
    async with nodes(tmp_path, addresses=("::1", "::1")) as (_, hosts):
        trainer = await forked(tmp_path, hosts)
        assert len(await trainer.base_checksum()) == 64
        await trainer.shut_down()
