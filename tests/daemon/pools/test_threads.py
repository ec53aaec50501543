"""A run keeps its threads for life, and takes a warm pool's where only the load would decide; doctor and
pools say so.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Config
from lorad.box.machine import Machine
from lorad.daemon.api.views import pool_view
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device
from lorad.daemon.pool import Pool, setup_for
from lorad.daemon.pools.life import find_or_make
from lorad.daemon.pools.threads import FILE
from lorad.daemon.process.processes import ProcessState
from lorad.daemon.queue.place import pool_for
from lorad.spec.model import convert
from lorad.states import Move
from lorad.store import runs
from tests.kit.daemon_world import behave, open_context, pid_of, reconciling, submit, until, until_state, want
from tests.kit.leftovers import kill_leftovers
from tests.kit.world import SMALL, World, world

IDLE = Machine(cpus=8, cores=8, all_cores=8, quota=None, load=0.1, memory=1 << 36, allocator="glibc 2.36")
BUSY = replace(IDLE, load=8.0)
LARGE = 1_000_000_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    behave(tmp_path, driver={"seconds": 0.3})
    yield tmp_path
    kill_leftovers(tmp_path)


def give(ctx: Context, machine: Machine) -> None:
    ctx.gpus.machine = lambda: machine


async def pause(ctx: Context, name: str) -> None:
    await until(lambda: runs.get(ctx.store, name).step >= 1)
    want(ctx, name, "pause")
    await until_state(ctx, name, "paused")


async def ended(ctx: Context, name: str) -> int:
    """The threads that the pool's process had in the last attempt of a run that is over now."""
    row = await until_state(ctx, name, "ended")
    assert row.reason == "completed", row.detail
    pool = ctx.pools[row.pool or ""]
    env = json.loads(pool.attempt().command.read_bytes())["env"]
    assert env["OMP_NUM_THREADS"] == str(pool.setup.threads)
    return pool.setup.threads


async def all_pools_gone(ctx: Context) -> None:
    await until(lambda: not any(pool.process.is_up for pool in ctx.pools.values()))


def resume(ctx: Context, name: str) -> None:
    runs.move(ctx.store, name, Move.RESUME)
    ctx.loop.poke()


def warnings(ctx: Context, name: str) -> list[str]:
    rows = ctx.store.rows("SELECT data FROM events WHERE run = ? AND kind = 'warning'", (name,))
    return [json.loads(row["data"])["message"] for row in rows]


@pytest.mark.system
async def test_resumed_run_keeps_threads_under_any_load(home: Path) -> None:
    async with reconciling(home) as ctx:
        give(ctx, IDLE)
        submit(ctx, "a", parameters=LARGE)
        await pause(ctx, "a")
        give(ctx, BUSY)
        submit(ctx, "b", model="/models/other", parameters=LARGE)  # the warm pool makes room for another base
        assert await ended(ctx, "b") == 1
        resume(ctx, "a")
        assert await ended(ctx, "a") == 8
        assert warnings(ctx, "a") == []


async def test_killed_run_keeps_threads_under_new_daemon(home: Path) -> None:
    async with reconciling(home) as ctx:
        give(ctx, BUSY)
        submit(ctx, "a", parameters=LARGE)
        await until(lambda: runs.get(ctx.store, "a").step >= 1)
        os.kill(pid_of(ctx, "a"), signal.SIGKILL)
        assert (await until_state(ctx, "a", "ended")).reason == "lost"
        (pool,) = ctx.pools.values()
        os.kill(pool.process.pid or 0, signal.SIGKILL)
        await all_pools_gone(ctx)
    async with reconciling(home) as ctx:
        give(ctx, IDLE)
        resume(ctx, "a")
        assert await ended(ctx, "a") == 1


async def test_run_without_runtime_file_keeps_pool_threads(home: Path) -> None:
    async with reconciling(home, idle_timeout=0.0) as ctx:
        give(ctx, IDLE)
        submit(ctx, "a", parameters=LARGE)
        await pause(ctx, "a")
        await all_pools_gone(ctx)
        (runs.get(ctx.store, "a").dir.root / FILE).unlink()
        give(ctx, BUSY)
        resume(ctx, "a")
        assert await ended(ctx, "a") == 8


async def test_run_with_excess_threads_continues_and_warns(home: Path) -> None:
    async with reconciling(home) as ctx:
        give(ctx, IDLE)
        submit(ctx, "a", parameters=LARGE)
        await pause(ctx, "a")
        give(ctx, replace(IDLE, quota=2.0))
        resume(ctx, "a")
        assert await ended(ctx, "a") == 8
        (warning,) = warnings(ctx, "a")
        assert "8 threads" in warning and "only 2 can run here" in warning


async def test_nondeterministic_run_chooses_threads_anew(home: Path) -> None:
    async with reconciling(home, idle_timeout=0.0) as ctx:
        give(ctx, IDLE)
        submit(ctx, "a", parameters=LARGE, deterministic=False)
        await pause(ctx, "a")
        await all_pools_gone(ctx)
        give(ctx, BUSY)
        resume(ctx, "a")
        assert await ended(ctx, "a") == 1


@pytest.mark.parametrize("slots", [1, 5])
async def test_load_alone_never_bars_a_warm_pool(home: Path, slots: int) -> None:
    async with reconciling(home) as ctx:
        if slots > 1:
            ctx.gpus.devices = [Device(f"cpu:{n}", "a part of the CPU", 1 << 30) for n in range(slots)]
        cores = 8 * slots
        idle = replace(IDLE, cpus=cores, cores=cores, all_cores=cores)
        give(ctx, idle)
        submit(ctx, "a", parameters=LARGE)
        assert await ended(ctx, "a") == 8
        give(ctx, replace(idle, load=float(cores)))
        submit(ctx, "b", parameters=LARGE)
        assert await ended(ctx, "b") == 8
        assert len(ctx.pools) == 1 and "is warm" in kept(ctx, "b")["reason"]["text"]


def test_pool_that_is_up_comes_before_its_equals(home: Path) -> None:
    ctx = open_context(home)
    device = Device("cpu:1", "a part of the CPU", 1 << 30)
    setup = setup_for(convert({}), Config(), device, model_path="/models/tiny", dtype="float32", threads=1)
    cold = find_or_make(ctx, setup)
    assert find_or_make(ctx, setup) is cold
    warm = ctx.pools["tiny-9"] = Pool(cold.setup, ctx.home.pool("tiny-9"), process=ProcessState("alive", 1))
    assert find_or_make(ctx, setup) is warm


async def test_small_model_ignores_threads_of_warm_pool(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", pool={"threads": 2})
        assert await ended(ctx, "a") == 2
        submit(ctx, "b")
        assert await ended(ctx, "b") == 1


async def test_pool_serves_versions_despite_different_threads(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", pool={"threads": 2})
        await ended(ctx, "a")
        behave(home, driver={"seconds": 30})
        submit(ctx, "b", pool={"threads": 3})
        await until_state(ctx, "b", "running")
        assert pool_for(ctx, runs.get(ctx.store, "a")).setup.threads == 3
        want(ctx, "b", "kill")


async def test_damaged_runtime_file_keeps_its_run_waiting(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await pause(ctx, "a")
        (runs.get(ctx.store, "a").dir.root / FILE).write_text("{")
        resume(ctx, "a")
        assert "is damaged" in await until(lambda: runs.get(ctx.store, "a").waiting)


async def test_pool_view_shows_runtime_with_its_reasons(home: Path) -> None:
    async with reconciling(home) as ctx:
        give(ctx, IDLE)
        submit(ctx, "a", pool={"threads": 3})
        await ended(ctx, "a")
        (pool,) = ctx.pools.values()
        view = pool_view(ctx, pool)
        assert view.runtime is not None
        assert view.threads == view.runtime.threads == 3
        assert view.runtime.reasons["threads"].source == "spec"
        assert view.runtime.malloc["MALLOC_TRIM_THRESHOLD_"] == 1 << 30


def kept(ctx: Context, name: str) -> Any:
    return json.loads((runs.get(ctx.store, name).dir.root / FILE).read_bytes())


def checks(made: World) -> dict[str, Any]:
    return {check["name"]: check for check in made.json("doctor")}


@pytest.mark.system
def test_doctor_explains_threads_and_malloc_of_pools() -> None:
    with world() as made:
        made.home.root.mkdir()
        made.home.config.write_text("runtime: {threads: 2, malloc: off}")
        before = checks(made)
        assert before["tiny model"]["detail"].startswith("2 threads (config: runtime.threads")
        assert before["malloc"]["detail"] == "nothing set (config: runtime.malloc is off)"
        assert before["cpus"]["facts"]["cpus"] == len(os.sched_getaffinity(0))
        made.run("a", "pool.threads=1", text=SMALL)
        facts = checks(made)["pool tiny-1"]["facts"]
        assert (facts["threads"], facts["wait_policy"], facts["malloc"]) == (1, "passive", {})
        assert facts["reasons"]["threads"] == {"source": "spec", "text": "pool.threads"}
        assert "pool tiny-1" in made.lorad("doctor").stdout
        assert "is stopping" in made.lorad("pools", "stop", "tiny-1").stderr


@pytest.mark.parametrize(
    ("device", "asked", "given"), [("cpu", None, True), ("cuda:0", None, False), ("cuda:0", True, True)]
)
def test_runs_are_deterministic_on_request_or_cpu(device: str, asked: bool | None, given: bool) -> None:
    spec = convert({} if asked is None else {"deterministic": asked})
    setup = setup_for(
        spec, Config(), Device(device, "", 1 << 30), model_path="/m", dtype="float32", threads=1
    )
    assert setup.deterministic is given
