"""The real SGLang and the real vLLM on a node keep the rules of every engine, through its tunnel."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from lorad.adapters.peft import WEIGHTS
from lorad.engines.base import AdapterSource, Engine, Scorer
from lorad.engines.remote.engine import RemoteEngine
from tests.conformance.engine_suite import CANARY, EngineSuite
from tests.engines.real.places import opened
from tests.kit.fakes.random_adapters import Shapes, random_adapter
from tests.nodes.kit import nodes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(kind: str, work: Path) -> AsyncIterator[RemoteEngine]:
    """One server, on the second of two nodes; the one at home has `work`, from which its socket is named."""
    own, there = work / "nodes", work / "there"
    own.mkdir()
    there.mkdir()
    async with nodes(own) as (_, hosts), opened(kind, there, hosts=hosts[1:]) as engine:
        yield engine


@pytest.mark.long
class TestServersOnNodes(EngineSuite):
    """The engine suite, through an agent."""


# a node knows nothing of a server's kind: CI takes one
@pytest.mark.long
async def test_a_server_reads_its_nodes_copy(engine: Engine, server: RemoteEngine, shapes: Shapes) -> None:
    """Killed, it returns there, and serves what it served."""
    adapter = random_adapter(shapes, 1)
    loaded = await engine.load("run@1", AdapterSource(adapter.digest(), adapter=adapter))
    [one] = server._fleet.servers
    assert one.host is not None and one.process is not None and one.process.pid is not None
    [(name, path)] = (await one.holds()).items()
    assert Path(path) == one.host.directory / "adapters" / name
    assert await one.host.digest(f"adapters/{name}/{WEIGHTS}") == loaded.delivered
    before, seen = await engine.score("run@1", CANARY), []

    async def check(score: Scorer) -> None:
        seen.append(await score("run@1", CANARY))

    engine.on_return(check)
    old = psutil.Process(one.process.pid)
    os.kill(old.pid, signal.SIGKILL)
    await one.confirm_gone()
    assert np.abs(await engine.score("run@1", CANARY) - before).max() < 1e-4
    assert len(seen) == 1 and np.abs(seen[0] - before).max() < 1e-4 and not old.is_running()
