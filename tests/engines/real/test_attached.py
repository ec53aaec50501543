"""A server that somebody else runs: lorad comes and goes, and the server stays as it was."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lorad.engines.base import BASE, AdapterSource, Engine, Scorer
from lorad.engines.remote.engine import RemoteEngine
from tests.conformance.engine_suite import CANARY, SHORT, complete, prompt
from tests.engines.real.places import opened
from tests.kit.fakes.random_adapters import Shapes, random_adapter


async def test_attached_engine_unloads_its_versions_at_the_end(
    engine: Engine, server: RemoteEngine, kind: str, shapes: Shapes, tmp_path: Path
) -> None:
    one = server._fleet.servers[0]
    adapter = random_adapter(shapes, 1)
    async with opened(kind, tmp_path, urls=(str(one.http.address),), python="", env={}) as attached:
        await attached.load("theirs@1", AdapterSource(adapter.digest(), adapter=adapter))
        made = await complete(attached, "theirs@1", [prompt()], SHORT)
        assert np.abs(await attached.score(BASE, CANARY) - await engine.score(BASE, CANARY)).max() < 1e-4
        assert [name.partition("~")[0] for name in await one.holds()] == ["theirs@1"]
    assert list(await one.holds()) == [] and made["p", 0][2] == "length"


@pytest.mark.long
async def test_attached_engine_reloads_versions_after_a_restart(
    engine: Engine, server: RemoteEngine, kind: str, shapes: Shapes, tmp_path: Path
) -> None:
    one = server._fleet.servers[0]
    adapter = random_adapter(shapes, 1)
    checked: list[np.ndarray] = []

    async def check(score: Scorer) -> None:
        checked.append(await score("theirs@1", CANARY))

    async with opened(kind, tmp_path, urls=(str(one.http.address),), python="", env={}) as attached:
        await attached.load("theirs@1", AdapterSource(adapter.digest(), adapter=adapter))
        before = await attached.score("theirs@1", CANARY)
        attached.on_return(check)
        assert one.process is not None and one.process.pid is not None
        os.kill(one.process.pid, signal.SIGKILL)
        async with asyncio.timeout(240):
            again = await attached.score("theirs@1", CANARY)
        assert len(checked) == 1
        assert np.abs(checked[0] - before).max() < 1e-4 and np.abs(again - before).max() < 1e-4
