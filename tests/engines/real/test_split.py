"""A pool whose real servers have nodes, or devices, of their own beside those that train."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.protocol.nodes import GRANT, GrantStatus, NodesSetup, StaticNode
from lorad.protocol.pool_setup import RanksSetup
from tests.engines.real.places import setup_of
from tests.kit import pool_kit
from tests.kit.pool_kit import OPEN, generate, learn, publish, running_pool, until

HOSTS = tuple(StaticNode(name=f"h{place}", address=f"127.0.0.{place}") for place in (1, 2, 3))
START_SECONDS = 1800.0


def split(kind: str) -> dict[str, Any]:
    """A pool of FSDP and two servers."""
    server = msgspec.structs.replace(setup_of(kind), servers=2)
    return {"mode": "split", "trainer": "fsdp", "ranks": RanksSetup(), "engine": kind, "server": server}


@pytest.mark.long
def test_a_lost_node_costs_no_version(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version is attested on every server, by its node's copy."""
    monkeypatch.setattr(pool_kit, "DEADLINE", START_SECONDS)
    nodes = NodesSetup(nodes=1, rollout_nodes=2, hosts=HOSTS)
    with running_pool(tmp_path, **split(kind), nodes=nodes) as running, running.connect("a") as driver:
        driver.call("open", OPEN)
        learn(driver)
        publish(driver, tmp_path / "versions", 1)
        assert generate(driver, "a@1")
        for server, node in ((0, "h2"), (1, "h3")):
            assert (tmp_path / f"engine-{server}.log").read_text().startswith(f"{node}: ")
        granted = msgspec.json.decode((tmp_path / GRANT).read_bytes(), type=GrantStatus).nodes
        copies = [Path(node.directory) / "adapters" for node in granted]
        assert [len(list(copy.iterdir())) for copy in copies] == [0, 1, 1]
        os.kill(granted[2].pid, signal.SIGKILL)
        fleet = running.pool.engine._fleet  # type: ignore[attr-defined]
        until(lambda: [server.state for server in fleet.servers] == ["up", "failed"])
        learn(driver)
        publish(driver, tmp_path / "versions", 2)
        assert generate(driver, "a@2") and generate(driver, "a@1")


@pytest.mark.long
def test_a_killed_server_apart_costs_no_version(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others serve what was published while it was away, and it has that too once it is back."""
    monkeypatch.setattr(pool_kit, "DEADLINE", START_SECONDS)
    devices = ("cpu:0", "cpu:1", "cpu:2")
    with (
        running_pool(tmp_path, **split(kind), devices=devices, rollout_devices=2) as running,
        running.connect("a") as driver,
    ):
        driver.call("open", OPEN)
        learn(driver)
        publish(driver, tmp_path / "versions", 1)
        fleet = running.pool.engine._fleet  # type: ignore[attr-defined]
        os.kill(fleet.servers[1].process.pid, signal.SIGKILL)
        until(lambda: fleet.servers[1].state != "up")
        assert generate(driver, "a@1")
        learn(driver)
        publish(driver, tmp_path / "versions", 2)
        until(lambda: fleet.servers[1].state == "up")
        assert generate(driver, "a@2") and generate(driver, "a@1")
