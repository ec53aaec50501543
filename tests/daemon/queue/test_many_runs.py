"""Many runs in one pool: who joins, who waits and why, what a lost pool means for all of them; the audit of a
run.
"""

import functools
import inspect
import json
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from faults.kill9_many import Many
from lorad.box.config import Backend, Config
from lorad.box.machine import read_machine
from lorad.daemon.api.views import pool_view
from lorad.daemon.context import Context
from lorad.daemon.queue import snapshot
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.setups import Placement, candidates
from lorad.daemon.queue.tenants import (
    MAX_RANK,
    MAX_VERSIONS,
    Need,
    capacity_of,
    impossible,
    lacking,
    life_number,
    need_of,
    promised,
)
from lorad.engines.builtin import engine, local
from lorad.engines.remote.settings import MAX_VERSIONS as SERVERS_VERSIONS
from lorad.protocol.pool_setup import PoolSetup, ServerSetup
from lorad.protocol.preflight import SpecFacts
from lorad.protocol.status import Capacity, PoolInfo, PoolStatus, TenantStatus
from lorad.spec.model import convert
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.rows import RunRow
from tests.kit.daemon_world import (
    behave,
    hold,
    open_context,
    pid_of,
    reconciling,
    release,
    submit,
    until,
    until_state,
)
from tests.kit.world import world

SLOW = {"seconds": 0.3}


def told(ctx: Context, name: str) -> str:
    return str(runs.get(ctx.store, name).waiting)


def placed(ctx: Context) -> list[str]:
    return [run.name for pool in ctx.pools.values() for run in runs.active_in(ctx.store, pool.id)]


def completed(ctx: Context, name: str) -> RunRow | None:
    row = runs.get(ctx.store, name)
    return row if row.reason == "completed" else None


def leave(ctx: Context, name: str) -> None:
    runs.move(ctx.store, name, Move.END, reason=EndReason.STOPPED)


async def test_runs_with_different_settings_share_a_pool(home: Path) -> None:
    hold(home)
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        submit(
            ctx, "b", lora={"rank": 4, "alpha": 1, "target_modules": "q_proj"}, data={"prompts_per_step": 2}
        )
        submit(ctx, "c", algorithm={"group_size": 2}, rollout={"temperature": 0.5}, resources={"priority": 3})
        await until(lambda: all(runs.get(ctx.store, name).state == "running" for name in "abc"))
        assert len(ctx.pools) == 1 and ctx.pools["tiny-1"].number == 1
        release(home)
        for name in "abc":
            assert (await until_state(ctx, name, "ended")).reason == "completed"


@pytest.mark.system
async def test_lost_pool_restarts_once_for_all_runs(home: Path) -> None:
    behave(home, driver={"seconds": 60.0})  # of a step: none ends before the kill
    async with reconciling(home) as ctx:
        for name in "abc":
            submit(ctx, name, resources={"restart": "on-failure"})
        await until(lambda: {runs.get(ctx.store, name).state for name in "abc"} == {"running"})
        behave(home)
        ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        for name in "abc":
            row = await until(functools.partial(completed, ctx, name))
            assert row.attempt == 2 and life_number(row) == 2
        assert ctx.pools["tiny-1"].number == 2


async def test_late_loss_report_spares_the_new_pool(
    home: Path,
) -> None:
    behave(home, driver={"seconds": 0.5, "deaf": True})
    async with reconciling(home) as ctx:
        ctx.patience = replace(ctx.patience, pool_gone=60.0)
        submit(ctx, "late")
        await until_state(ctx, "late", "running")
        os.kill(pid_of(ctx, "late"), signal.SIGSTOP)  # it misses everything for now
        ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        await until(lambda: not ctx.pools["tiny-1"].process.is_up)
        submit(ctx, "next")
        await until_state(ctx, "next", "running")
        os.kill(pid_of(ctx, "late"), signal.SIGCONT)
        assert (await until_state(ctx, "late", "ended")).reason == "lost"
        assert (await until_state(ctx, "next", "ended")).reason == "completed"
        assert ctx.pools["tiny-1"].number == 2


def test_runs_of_different_users_never_share_a_pool(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "mine")
    submit(ctx, "theirs")
    with ctx.store.write() as connection:
        connection.execute("UPDATE runs SET owner_uid = owner_uid + 1 WHERE name = 'theirs'")
    place_runs(ctx)
    assert (
        placed(ctx) == ["mine"]
        and told(ctx, "theirs") == "pool tiny-1 is busy with run mine; starts when it ends"
    )
    leave(ctx, "mine")
    place_runs(ctx)
    assert [ctx.pools[name].setup.owner - os.getuid() for name in ("tiny-1", "tiny-2")] == [0, 1]


def test_burst_of_runs_never_reuses_promised_room(home: Path) -> None:
    ctx = open_context(home)
    for number in range(5):
        submit(ctx, f"r{number}", rollout={"max_staleness": 14})
    submit(ctx, "small")
    place_runs(ctx)
    assert placed(ctx) == ["r0", "r1", "r2", "small"]
    assert told(ctx, "r3") == "pool tiny-1 has room for 13 more versions, it needs 17; 3 runs are in it"
    leave(ctx, "r1")
    place_runs(ctx)
    assert placed(ctx) == ["r0", "r2", "r3", "small"]
    assert told(ctx, "r4") == "pool tiny-1 has room for 10 more versions, it needs 17; 4 runs are in it"


def test_fitting_run_passes_larger_one_of_equal_priority(home: Path) -> None:
    ctx = open_context(home)
    for number in range(3):
        submit(ctx, f"r{number}", rollout={"max_staleness": 14})
    place_runs(ctx)
    submit(ctx, "large", rollout={"max_staleness": 16})
    submit(ctx, "small")
    place_runs(ctx)
    assert placed(ctx)[-1] == "small" and "has room for 13 more versions, it needs 19" in told(ctx, "large")
    submit(ctx, "urgent", rollout={"max_staleness": 16}, resources={"priority": 1})
    submit(ctx, "usual")
    place_runs(ctx)
    assert told(ctx, "usual") == "run urgent is next on cpu, when it fits" and len(placed(ctx)) == 4


def test_impossible_run_ends_with_the_reason(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "vast", lora={"rank": 1000})
    place_runs(ctx)
    row = runs.get(ctx.store, "vast")
    assert (row.state, row.reason) == ("ended", "failed")
    assert row.detail == (
        "it can never run: an empty pool of its kind takes adapters up to rank 512, this one has 1000; "
        "lower lora.rank"
    )


async def test_what_a_pool_says_it_has_is_believed(home: Path) -> None:
    behave(home, pool={"capacity": {"max_versions": 7, "versions": 1, "max_rank": 8}})
    hold(home)
    async with reconciling(home) as ctx:
        submit(ctx, "a", lora={"rank": 8})
        await until_state(ctx, "a", "running")
        await until(lambda: ctx.pools["tiny-1"].status)
        for name in ("b", "c"):
            submit(ctx, name, lora={"rank": 8})
        await until(lambda: told(ctx, "c"))
        assert told(ctx, "c") == "pool tiny-1 has room for no more versions, it needs 3; 2 runs are in it"
        shown = pool_view(ctx, ctx.pools["tiny-1"])
        assert shown.capacity is not None
        assert (shown.capacity.max_versions, shown.tenants, shown.runs) == (7, [], [])
        submit(ctx, "d")
        assert "up to rank 8, this one has 16" in (await until_state(ctx, "d", "ended")).detail
        release(home)
        for name in "abc":
            assert (await until_state(ctx, name, "ended")).reason == "completed"


def test_exclusive_run_is_neither_passed_nor_joined(home: Path) -> None:
    ctx = open_context(home)
    for name, alone in (("a", False), ("b", False), ("alone", True), ("c", False)):
        submit(ctx, name, resources={"exclusive": alone})
    place_runs(ctx)
    assert placed(ctx) == ["a", "b"]
    assert (
        told(ctx, "alone")
        == "it is to have pool tiny-1 for itself (resources.exclusive); runs a and b are in it"
    )
    assert told(ctx, "c") == "run alone is next on cpu, when the others end"
    leave(ctx, "a")
    leave(ctx, "b")
    place_runs(ctx)
    assert (
        placed(ctx) == ["alone"]
        and told(ctx, "c") == "run alone has pool tiny-1 for itself; starts when it ends"
    )


def test_only_urgent_runs_pass_a_waiting_run(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a")
    place_runs(ctx)
    submit(ctx, "alone", resources={"exclusive": True})
    submit(ctx, "urgent", resources={"priority": 1})
    place_runs(ctx)
    assert placed(ctx) == ["urgent", "a"]
    leave(ctx, "alone")
    submit(ctx, "other", model="/models/other")
    submit(ctx, "late")
    place_runs(ctx)
    assert told(ctx, "other").startswith("pool tiny-1 is busy with runs urgent and a")
    assert told(ctx, "late") == "run other is next on cpu, when the others end"


SERVER = ServerSetup(max_rank=16, targets=("q_proj",), context_length=128)


FACTS = {"modules": ["q_proj"], "linears": ["q_proj"], "max_positions": 512}


def setups(ctx: Context, **ranks: int) -> list[tuple[str, int]]:
    """Queues runs of these ranks on servers and places them; each pool and the rank that it takes."""
    ctx.config = Config(backends={"sglang": Backend(python=Path("/venv/bin/python"))})
    for name, rank in ranks.items():
        submit(ctx, name, rollout={"backend": "sglang"}, lora={"rank": rank}, resources={"devices": 1})
        path = ctx.home.run(name).root / "request.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"facts": FACTS}))
    place_runs(ctx)
    return [(pool.id, pool.setup.server.max_rank) for pool in ctx.pools.values() if pool.setup.server]


def test_long_queue_for_servers_is_examined_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, asked, machine = open_context(home), Counter[str](), read_machine()
    ctx.gpus.machine = lambda: machine

    def counted(ctx: Context, run: RunRow) -> list[Placement]:
        asked[run.name] += 1
        return candidates(ctx, run)

    submit(ctx, "busy", model="/models/other", resources={"exclusive": True})
    place_runs(ctx)
    monkeypatch.setattr(snapshot, "candidates", counted)
    assert setups(ctx, **{f"q{number}": 16 for number in range(10)}) == []
    assert len(asked) == 10 and set(asked.values()) == {1}  # for itself, and for all of them


def test_server_takes_largest_queued_and_smaller_ranks(
    home: Path,
) -> None:
    ctx = open_context(home)
    assert setups(ctx, a=8, b=40, c=16) == [("tiny-1", 64)] and placed(ctx) == ["a", "b", "c"]
    assert SERVER.max_rank == 16 and wide(64).takes(wide(16)) and not wide(16).takes(wide(64))
    assert wide(16).widened(wide(64)) == wide(64) and wide(64).widened(wide(16)) == wide(64)
    other = msgspec.structs.replace(wide(64), owner=7)
    assert not other.takes(wide(16)) and wide(16).widened(other) == wide(16)


def test_pool_serves_its_base_on_any_device() -> None:
    pool = msgspec.structs.replace(wide(64), device="cuda:0")
    asked = msgspec.structs.replace(wide(16), device="cuda:1", threads=4, deterministic=False)
    assert pool.serves(asked) and not asked.serves(pool)
    for other in ({"device": "cpu"}, {"devices": ("cuda:1", "cuda:2")}, {"model_path": "/n"}, {"owner": 7}):
        assert not pool.serves(msgspec.structs.replace(asked, **other))


def test_a_snapshot_stays_as_it_was_taken(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a")
    before = snapshot.take_snapshot(ctx, runs.queue(ctx.store))
    place_runs(ctx)
    after = before.with_runs_of(ctx)
    devices = before.devices
    assert [run.name for run in before.queued] == ["a"] and not before.active and not before.pools_on(devices)
    assert [run.name for run in after.tenants["tiny-1"]] == ["a"] and len(after.pools_on(devices)) == 1


def wide(rank: int) -> PoolSetup:
    server = msgspec.structs.replace(SERVER, max_rank=rank)
    return PoolSetup(
        pool="p", model="tiny", model_path="/m", engine="sglang", mode="resident", server=server, owner=0
    )


def test_run_needs_versions_plus_load_and_slot() -> None:
    spec = convert({"rollout": {"max_staleness": 3}, "lora": {"rank": 8}})
    facts = SpecFacts(adapter_parameters=1000)
    assert need_of(spec, facts, "float32") == Need(6, 8, 1000 * (16 + 6 * 4))
    assert need_of(convert({}), facts, "bfloat16") == Need(3, 16, 1000 * (16 + 3 * 2))
    facts = SpecFacts(adapter_parameters=1000, critic_parameters=500)
    assert need_of(convert({}), facts, "bfloat16") == Need(3, 16, 1000 * (16 + 3 * 2) + 500 * 16)


def test_limits_are_those_that_engines_have() -> None:
    assert MAX_RANK == local.MAX_RANK and SERVERS_VERSIONS == MAX_VERSIONS
    assert inspect.signature(engine.BuiltinEngine).parameters["max_versions"].default == MAX_VERSIONS
    assert capacity_of(None, None) == Capacity(64, 0, 512) and capacity_of(SERVER, None) == Capacity(
        62, 0, 16
    )


# by a run in the pool, by somebody who made a request, and for good
LOADED = ["a@1", "a@2", "served@1", "x@1"]


def test_room_already_counted_is_not_promised_twice() -> None:
    info = PoolInfo("p", 1, "m", "/m", "", "builtin", "builtin", "fused", "cpu", "float32", 1, 64, {})
    status = PoolStatus(info, [TenantStatus("a", 1, "idle", 10)], LOADED, 0.0, 0.0, 0, 0.0, kept=["x@1"])
    needs = {("a", 1): Need(3, 8, 100), ("b", 1): Need(3, 8, 100)}
    assert promised(Capacity(64, 4, 512, 1000, 100), needs, status) == Capacity(64, 7, 512, 1000, 200)
    assert promised(Capacity(64, 9, 512, 1000, 900), needs, status) == Capacity(64, 11, 512, 1000, 1000)


def test_memory_that_is_told_counts() -> None:
    full = Capacity(64, 0, 512, 2 << 20, 1 << 20)
    lack = lacking(full, Need(3, 8, 3 << 19))
    assert lack is not None and lack.says == "has 1.0 MiB left, it needs 1.5 MiB for its adapter"
    assert lacking(full, Need(3, 8, 1 << 20)) is None and impossible(full, Need(3, 8, 2 << 20)) == ""
    assert "2.0 MiB left" in impossible(full, Need(3, 8, 3 << 20))


def test_each_lack_names_its_own_remedy() -> None:
    rank, versions = Capacity(64, 0, 8, 0, 0), Capacity(1, 0, 512, 0, 0)
    assert impossible(rank, Need(3, 16)).endswith("lower lora.rank")
    assert impossible(versions, Need(3, 16)).endswith("lower rollout.max_staleness or lora.rank")


@pytest.mark.long
def test_killed_pool_loses_and_repeats_no_batch() -> None:
    with world() as made:
        expected = Many(made, 3, 6, "alone").alone()
        made.client.stop_pool("tiny-1")
        made.until(lambda: not made.client.pools(), "the pool has ended")
        many = Many(made, 3, 6)
        assert "pool under 3 runs in 1 pool" in many.together(("pool",), random.Random(0))
        assert many.exceptions(expected) == []
        assert [len(run.attempts) for run in many.shown()] == [2, 2, 2]
