"""Runs on a cluster: one asks for nodes at a time, in the order of the queue, and says what it waits for."""

import functools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.box.cluster import Cluster
from lorad.box.config import Backend, Config, Limit, Queue
from lorad.daemon.api.verbs.pools import list_nodes
from lorad.daemon.context import Context
from lorad.daemon.pools.grants import with_likely_first
from lorad.daemon.process.sharing import Users
from lorad.daemon.queue import cluster as room
from lorad.daemon.queue.forecast import forecast
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.setups import setup_of
from lorad.protocol.nodes import GRANT
from lorad.protocol.preflight import SpecFacts
from lorad.states import RunState
from lorad.store import events, pools, runs
from lorad.store.pools import GrantRow, NodeRow
from tests.kit.daemon_world import behave, open_context, reconciling, submit, until, until_state
from tests.kit.fakes.fake_cluster import FILE, cluster, write_cluster
from tests.kit.fakes.gpu_kit import NO_QUERY, gpus

SGLANG = {"sglang": Backend(python=Path("/opt/sglang/bin/python"))}
RAY = Cluster(kind="ray", address="10.0.0.9:6379", python=Path("/opt/ray/bin/python"))
FACTS = SpecFacts(max_positions=2048)
SLOW = {"driver": {"seconds": 0.3}}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(room, "SETTLE_SECONDS", 0.2)
    yield


def spread(ctx: Context, name: str, nodes: int = 2, model: str = "/models/one", **sections: Any) -> None:
    """Submit a run over so many nodes with 8 GPUs each."""
    asked = {"nodes": nodes, "devices": 8 * nodes, "where": "cluster"} | sections.pop("resources", {})
    trainer = {"backend": "fsdp", "dp": 8 * nodes, "steps": 6} | sections.pop("trainer", {})
    rollout = {"backend": "sglang", "servers": nodes, "tp": 8} | sections.pop("rollout", {})
    facts = sections.pop("facts", FACTS)
    submit(ctx, name, model, facts=facts, trainer=trainer, rollout=rollout, resources=asked, **sections)


def told(ctx: Context, name: str) -> str:
    return str(runs.get(ctx.store, name).waiting)


def holders(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ctx.home.root / FILE).read_text())["nodes"]
    return found


async def test_a_run_is_placed_on_nodes(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 3)) as ctx:
        spread(ctx, "a")
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        (pool,) = ctx.pools.values()
        assert pool.where == "h0, h1" and pool.names == ()
        (grant,) = pools.grants(ctx.store)
        assert (grant.pool, grant.life, grant.state, grant.nodes) == (pool.id, 1, "granted", ["h0", "h1"])
        await until(lambda: [n.bases for n in pools.nodes(ctx.store)] == [["/models/one"]] * 2)
        nodes = [(node.node, node.state, len(node.devices)) for node in pools.nodes(ctx.store)]
        assert nodes == [("h0", "granted", 8), ("h1", "granted", 8)]
        leases = pools.leases(ctx.store)
        assert len(leases) == 16 and (leases[0].device, leases[0].node) == ("h0/cuda:0", "h0")
        kinds = [event.kind for event in events.newest(ctx.store, 100, "a")]
        assert "granted" in kinds


async def test_only_the_first_run_asks_for_nodes(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        write_cluster(home, {"h0": 1, "h1": 1})
        spread(ctx, "a")
        await until(lambda: told(ctx, "a") == "waits for 2 x 8 GPUs of the cluster: 2 nodes: 0 free")
        spread(ctx, "b", 1, "/models/two")
        await until(lambda: told(ctx, "b") == "run a is before it: waits for 2 x 8 GPUs of the cluster")
        assert len(ctx.pools) == 1
        write_cluster(home, {"h0": None, "h1": None})
        for name in ("a", "b"):
            row = await until_state(ctx, name, "ended")
            assert row.reason == "completed", row.detail


async def test_an_idle_pool_gives_its_nodes_back(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "ended")
        spread(ctx, "b", 1, "/models/two")
        await until_state(ctx, "b", "ended")
        assert {pool.id: pool.process.is_up for pool in ctx.pools.values()} == {"one-1": False, "two-1": True}
        assert {row.pool: row.state for row in pools.grants(ctx.store)} == {
            "one-1": "over",
            "two-1": "granted",
        }


async def test_unused_nodes_are_given_back(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2, idle_timeout=0.5)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "ended")
        (pool,) = ctx.pools.values()
        await until(lambda: not pool.process.is_up)
        await until(lambda: {node.state for node in pools.nodes(ctx.store)} == {"free"})
        assert json.loads((pool.root / "pool.json").read_text())["idle_timeout"] == 0.5


@pytest.mark.system
async def test_patience_ends_and_others_have_their_turn(home: Path) -> None:
    behave(home, **SLOW)
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2, patience=3.0)) as ctx:
        write_cluster(home, {"h0": 1, "h1": None})
        spread(ctx, "a")
        spread(ctx, "b", 1, "/models/two")
        assert (await until_state(ctx, "b", "ended")).reason == "completed"
        assert runs.get(ctx.store, "a").state in ("queued", "starting", "stopping")
        write_cluster(home, {"h0": None, "h1": None})
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        moves = [event.data.get("detail") for event in events.newest(ctx.store, 100, "a")]
        assert "2 x 8 GPUs were not granted in 3 s" in moves


async def test_patience_ends_beside_a_serving_pool(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2, patience=0.5)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "ended")
        runs.set_fields(ctx.store, "a", serving=1)
        await until(lambda: bool(ctx.pools["one-1"].serves))
        spread(ctx, "b", 1, "/models/two")
        spread(ctx, "c", 1, "/models/three")
        why = "1 x 8 GPUs were not granted in 0.5 s"
        await until(lambda: why in [event.data.get("detail") for event in events.newest(ctx.store, 100, "b")])
        assert ctx.pools["one-1"].process.is_up


async def test_without_others_a_run_waits_on(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2, patience=0.2)) as ctx:
        write_cluster(home, {"h0": 1, "h1": 1})
        spread(ctx, "a")
        await until(lambda: told(ctx, "a").endswith("0 free"))
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 1.0)
        assert runs.get(ctx.store, "a").attempt == 1 and runs.get(ctx.store, "a").state == "starting"


async def test_higher_priority_asks_first(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        write_cluster(home, {"h0": 1, "h1": 1})
        spread(ctx, "low")
        await until(lambda: told(ctx, "low").endswith("0 free"))
        spread(ctx, "high", 2, "/models/two", resources={"priority": 5})
        await until(lambda: told(ctx, "high").endswith("0 free"))
        assert "preempted by high" in told(ctx, "low") or runs.get(ctx.store, "low").preempted == "high"
        write_cluster(home, {"h0": None, "h1": None})
        ended = [await until_state(ctx, name, "ended") for name in ("high", "low")]
        assert {run.reason for run in ended} == {"completed"}


@pytest.mark.system
async def test_lower_priority_gives_its_nodes(home: Path) -> None:
    behave(home, driver={"seconds": 1.0})  # of a step of the first attempt, which is still there then
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        spread(ctx, "low")
        await until_state(ctx, "low", "running")
        behave(home)
        spread(ctx, "high", 1, "/models/two", resources={"priority": 5})
        assert (await until_state(ctx, "high", "ended")).reason == "completed"
        assert (await until_state(ctx, "low", "ended")).reason == "completed"
        assert runs.get(ctx.store, "low").attempt == 2


async def test_agents_of_another_user_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(home, **SLOW)
    monkeypatch.setattr(Users, "shared", True)
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        write_cluster(home, {"h0": None, "h1": None}, uid=54321)
        spread(ctx, "a")
        run = await until_state(ctx, "a", "ended")
        assert run.reason == "failed" and "the cluster works as 54321 (uid 54321)" in run.detail


def test_pools_on_a_cluster_hold_nothing_here(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 2))
    gpus(ctx, 1, monkeypatch, tmp_path)
    spread(ctx, "a")
    submit(ctx, "b", "/models/two")
    place_runs(ctx)
    assert {run.name for run in runs.in_states(ctx.store, RunState.STARTING)} == {"a", "b"}


def test_any_takes_this_machine_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 2))
    gpus(ctx, 8, monkeypatch, tmp_path)
    for name in ("a", "b"):
        spread(ctx, name, 1, f"/models/{name}", resources={"where": "any"})
    place_runs(ctx)
    assert [pool.where for pool in ctx.pools.values()] == [
        ", ".join(f"cuda:{n}" for n in range(8)),
        "1 x 8 GPUs",
    ]


def test_nodes_count_for_the_limit_of_devices(home: Path) -> None:
    queue = Queue(limits=Limit(devices=8))
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 2), queue=queue)
    spread(ctx, "a")
    place_runs(ctx)
    assert told(ctx, "a") == "me has 0 of 8 devices, it needs 16"


def test_a_cluster_that_shrank_is_told(home: Path) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 2))
    spread(ctx, "a")
    ctx.config = Config(backends=SGLANG, cluster=cluster(home, 1))
    place_runs(ctx)
    assert told(ctx, "a") == "resources.nodes: 2, but the cluster has 1 node with 8 GPUs"


def test_a_forecast_leaves_it_to_the_cluster(home: Path) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 2))
    spread(ctx, "a")
    run = runs.get(ctx.store, "a")
    with ctx.store.write() as connection:
        connection.execute("DELETE FROM runs")
    start = forecast(ctx, run)
    assert (start.state, start.why, start.devices) == ("now", "the cluster grants them", ["2 x 8 GPUs"])


def test_free_nodes_with_the_base_are_tried_first(home: Path) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 4))
    spread(ctx, "a", 1)
    place_runs(ctx)
    (pool,) = ctx.pools.values()
    for name, bases in (("h2", ["/models/one"]), ("h3", ["/models/two"])):
        row = NodeRow(
            node=name, cluster="static", address="", boot_id="", uid=0, devices=[], bases=bases,
            seen_at=0.0, state="free",
        )  # fmt: skip
        pools.put_cluster_row(ctx.store, row)
    found = with_likely_first(ctx, pool)
    assert found is not None and [host.name for host in found.hosts] == ["h2", "h0", "h1", "h3"]
    changed = replace(pool.setup, nodes=found)
    assert changed.key == pool.setup.key


def test_what_gpus_of_nodes_must_have(home: Path) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 4))
    facts = replace(FACTS, memory_needed=272 << 30)
    spread(ctx, "a", facts=facts, pool={"memory_fraction": 0.85})
    spread(
        ctx, "apart", facts=facts, resources={"rollout_nodes": 1}, trainer={"dp": 8}, rollout={"servers": 1}
    )
    for name, gib in (("a", 20), ("apart", 0)):
        asked = setup_of(ctx, runs.get(ctx.store, name)).nodes
        assert asked is not None and asked.memory == gib << 30


def test_nodes_of_ray_with_the_base_are_named(home: Path) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=RAY)
    spread(ctx, "a")
    place_runs(ctx)
    (pool,) = ctx.pools.values()
    had = [("h1", "/models/one", "10.0.0.9:6379"), ("h2", "/models/two", "10.0.0.9:6379")]
    for name, base, where in (*had, ("h3", "/models/one", "static")):
        row = NodeRow(
            node=name, cluster=where, address=f"{name}'s", boot_id="", uid=0, devices=[], bases=[base],
            seen_at=0.0, state="free",
        )  # fmt: skip
        pools.put_cluster_row(ctx.store, row)
    found = with_likely_first(ctx, pool)
    assert found is not None and found.warm == ("h1's",)
    assert replace(pool.setup, nodes=found).key == pool.setup.key


@pytest.mark.system
async def test_an_exclusive_run_holds_up_no_others(home: Path) -> None:
    behave(home, driver={"seconds": 0.6})
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 4)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "running")
        spread(ctx, "alone", resources={"exclusive": True})
        await until(lambda: "resources.exclusive" in told(ctx, "alone"))
        spread(ctx, "joins")
        spread(ctx, "other", 2, "/models/two")
        await until(lambda: "run alone is next on 2 x 8 GPUs" in told(ctx, "joins"))
        await until_state(ctx, "other", "running")
        for name in ("a", "alone"):
            assert (await until_state(ctx, name, "ended")).reason == "completed"


async def test_a_pool_may_go_on_without_a_node(home: Path) -> None:
    behave(home, driver={"seconds": 0.6})
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "running")
        (pool,) = ctx.pools.values()
        path = pool.attempt().work / GRANT
        status = json.loads(path.read_text()) | {"state": "lost", "words": "h1: its agent exited with code 1"}
        path.write_text(json.dumps(status))
        await until(lambda: [node.state for node in pools.nodes(ctx.store)] == ["granted", "lost"])
        assert [node.node for node in pool.nodes] == ["h0"]
        lost = [event.data for event in events.newest(ctx.store, 100, "a") if event.kind == "node_lost"]
        assert [one["node"] for one in lost] == ["h1"]


async def test_a_lost_node_of_servers_is_told(home: Path) -> None:
    behave(home, driver={"seconds": 0.6})
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        spread(ctx, "a")
        await until(lambda: [node.state for node in pools.nodes(ctx.store)] == ["granted"] * 2)
        (pool,) = ctx.pools.values()
        path = pool.attempt().work / GRANT
        status = json.loads(path.read_text())
        left = {"words": "h1: its agent exited with code 1", "nodes": status["nodes"][:1]}
        path.write_text(json.dumps(status | left))  # as a pool does that goes on without it
        await until(lambda: [node.state for node in pools.nodes(ctx.store)] == ["granted", "lost"])
        assert {lease.node for lease in pools.leases(ctx.store)} == {"h0"}
        lost = [event.data for event in events.newest(ctx.store, 100, "a") if event.kind == "node_lost"]
        assert [(one["node"], one["how"]) for one in lost] == [("h1", left["words"])]
        path.write_text(json.dumps(status))
        await until(lambda: [node.state for node in pools.nodes(ctx.store)] == ["granted"] * 2)
        assert len(pools.leases(ctx.store)) == 16


async def test_the_newest_grant_has_the_last_word(home: Path) -> None:
    ctx = open_context(home, backends=SGLANG, cluster=cluster(home, 1))
    row = NodeRow(
        node="h0", cluster="static", address="", boot_id="", uid=0, devices=[], bases=[], seen_at=0.0,
        state="free",
    )  # fmt: skip
    pools.put_cluster_row(ctx.store, row)
    for pool, since in (("b-1", 1.0), ("a-1", 2.0), ("c-1", 1.5)):
        row_of = functools.partial(GrantRow, kind="static", external="", state="over", detail="")
        pools.put_cluster_row(ctx.store, row_of(pool=pool, life=1, since=since, nodes=["h0"]))
    (node,) = await list_nodes(ctx, NO_QUERY)
    assert node.says == "over (a-1@1)"


async def test_runs_leave_nodes_asked_to_end(home: Path) -> None:
    behave(home, **SLOW)
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "running")
        (pool,) = ctx.pools.values()
        path, first = pool.attempt().work / GRANT, pool.number
        path.write_text(json.dumps(json.loads(path.read_text()) | {"leaving": ["h1"]}))
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        assert runs.get(ctx.store, "a").attempt == 2 and pool.number == first + 1
        moves = [event.data.get("detail") for event in events.newest(ctx.store, 100, "a")]
        assert moves.count("h1 of the cluster: asked to end") == 2  # it stops, and is queued again


async def test_nodes_nobody_asked_for_are_refused(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        write_cluster(home, {"h0": 1, "h1": 1})
        spread(ctx, "a")
        await until(lambda: told(ctx, "a").endswith("0 free"))
        (pool,) = ctx.pools.values()
        node = {"node": "stolen", "ip": "", "port": 1, "certificate": "", "boot_id": "", "directory": ""}
        lie = {"state": "granted", "nodes": [node | {"pid": 1, "lorad": "", "uid": 0}]}
        os.kill(pool.process.pid or 0, signal.SIGSTOP)
        (pool.attempt().work / GRANT).write_text(json.dumps(lie))
        await until(lambda: "names nodes that were not asked for" in "".join(ctx.loop.troubles.lines(None)))
        assert pools.nodes(ctx.store) == [] and pool.is_waiting
        os.kill(pool.process.pid or 0, signal.SIGCONT)


async def test_pools_that_ended_unseen_have_no_nodes(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "ended")
        (pool,) = ctx.pools.values()
        await until(lambda: [row.state for row in pools.grants(ctx.store)] == ["granted"])
    os.kill(pool.process.pid or 0, signal.SIGKILL)
    await until(lambda: ctx.processes.inspect(pool.attempt()).is_over)
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        await until(lambda: [row.state for row in pools.grants(ctx.store)] == ["over"])
        assert {node.state for node in pools.nodes(ctx.store)} == {"free"}
        assert pools.leases(ctx.store) == []


async def test_tables_are_made_anew_from_pools(home: Path) -> None:
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2, idle_timeout=0.3)) as ctx:
        spread(ctx, "a")
        await until_state(ctx, "a", "ended")
        await until(lambda: [row.state for row in pools.grants(ctx.store)] == ["over"])
        before = pools.grants(ctx.store), [node.node for node in pools.nodes(ctx.store)]
        with ctx.store.write() as connection:
            connection.execute("DELETE FROM grants")
            connection.execute("DELETE FROM nodes")
    async with reconciling(home, backends=SGLANG, cluster=cluster(home, 2)) as ctx:
        await until(lambda: pools.grants(ctx.store) == before[0])
        assert [node.node for node in pools.nodes(ctx.store)] == before[1]
