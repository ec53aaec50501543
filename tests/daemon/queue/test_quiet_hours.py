"""In quiet hours no run starts on quiet devices, and those there stop at their next step and come back."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Queue
from lorad.cli.commands.pools import device_row
from lorad.daemon.context import Context
from lorad.daemon.pools.life import timeout_of
from lorad.daemon.queue.choose import Blocked, choose, choose_devices
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.set_aside import give_way, keep_set_aside
from lorad.daemon.queue.setups import Placement, candidates
from lorad.daemon.queue.snapshot import take_snapshot
from lorad.errors import SpecError
from lorad.store import runs
from tests.kit.daemon_world import behave, open_context, serving, submit, until, until_state
from tests.kit.fakes.gpu_kit import Gpu, Nvml, gpus

OFFICE = Queue(quiet_hours=["mon-fri 09:00-18:00"])


def at(text: str) -> Callable[[], float]:
    return datetime.fromisoformat(text).timestamp


BEFORE, DURING, AFTER = (at(f"2026-11-25 {clock}") for clock in ("08:00", "12:00", "18:00"))


def box(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **queue: Any) -> Context:
    ctx = open_context(home, queue=Queue(quiet_hours=OFFICE.quiet_hours, **queue))
    gpus(ctx, 2, monkeypatch, tmp_path)
    Nvml(GPU_0=Gpu(), GPU_1=Gpu()).install(monkeypatch)
    return ctx


def looked(ctx: Context, clock: Callable[[], float]) -> None:
    ctx.queue.clock = clock
    keep_set_aside(ctx)
    give_way(ctx)
    place_runs(ctx)


def test_runs_use_devices_that_are_not_quiet(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch, quiet_devices=["cuda:0"])
    for name in ("a", "b"):
        submit(ctx, name, model=f"/models/{name}")
    looked(ctx, DURING)
    a, b = (runs.get(ctx.store, name) for name in "ab")
    assert ctx.pools[a.pool or ""].setup.names == ("cuda:1",) and b.state == "queued"
    assert b.waiting.startswith("0 of 2 devices free; cuda:0 is quiet until 18:00 (queue.quiet_hours)")
    looked(ctx, AFTER)
    assert runs.get(ctx.store, "b").state == "starting"


def test_quiet_hours_stop_runs_only_within(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch)
    submit(ctx, "a")
    looked(ctx, BEFORE)
    assert runs.get(ctx.store, "a").state == "starting"
    looked(ctx, DURING)
    a = runs.get(ctx.store, "a")
    assert (a.state, a.yielded) == ("stopping", "cuda:0 is quiet until 18:00 (queue.quiet_hours)")


def test_serving_starts_in_quiet_hours(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = box(home, tmp_path, monkeypatch)
    submit(ctx, "a")
    looked(ctx, DURING)
    run = runs.get(ctx.store, "a")
    now = take_snapshot(ctx, runs.queue(ctx.store))
    assert isinstance(choose(ctx, now, run), Blocked)
    assert isinstance(choose_devices(now, candidates(ctx, run)), Placement)


def test_idle_pools_leave_quiet_devices_soon(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch)
    submit(ctx, "a")
    looked(ctx, BEFORE)
    pool = ctx.pools["tiny-1"]
    assert timeout_of(ctx, pool) == 600
    looked(ctx, DURING)
    assert timeout_of(ctx, pool) == 10


def test_unknown_quiet_devices_are_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = box(home, tmp_path, monkeypatch, quiet_devices=["cuda:0", "cuda:9"])
    ctx.queue.clock = DURING
    with pytest.raises(SpecError, match="this machine has no cuda:9"):
        keep_set_aside(ctx)
    assert [*ctx.gpus.set_aside] == ["cuda:0"]


async def test_run_returns_when_quiet_hours_end(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home, queue=OFFICE) as api:
        ctx = api.ctx
        ctx.queue.clock = BEFORE
        await api.run("a")
        await until(lambda: runs.get(ctx.store, "a").step >= 1)
        ctx.queue.clock = DURING
        await until(lambda: runs.get(ctx.store, "a").state == "queued")
        (device,) = await api("devices")
        assert device.quiet_until == AFTER() and "quiet until" in device_row(device)[-1]
        await until(lambda: "cpu is quiet until 18:00" in runs.get(ctx.store, "a").waiting)
        ctx.queue.clock = AFTER
        assert (await until_state(ctx, "a", "ended")).attempt == 2
