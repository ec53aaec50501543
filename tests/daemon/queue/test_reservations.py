"""A device that a user reserved: nothing is placed there until it is released or its time is over."""

import os
import signal
from pathlib import Path

import pytest

from lorad.cli.commands.pools import device_row
from lorad.daemon.context import Context
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.set_aside import give_way, keep_set_aside
from lorad.errors import Conflict, NotFound, SpecError
from lorad.records.requests import ReserveRequest
from lorad.store import pools, runs
from lorad.store.rows import ReservationRow
from tests.kit.daemon_world import behave, open_context, reconciling, serving, submit, until, until_state
from tests.kit.fakes.gpu_kit import Gpu, Nvml, gpus, taken
from tests.kit.world import SMALL, world

NOON = 1_700_000_000.0


def reserve(ctx: Context, device: str, *, seconds: float | None = None, urgent: bool = False) -> None:
    row = ReservationRow(
        device=device, owner="alice", owner_uid=1, why="paper", made_at=NOON, seconds=seconds, urgent=urgent
    )
    pools.reserve(ctx.store, row, device)
    keep_set_aside(ctx)


def box(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Context:
    ctx = open_context(home)
    gpus(ctx, count, monkeypatch, tmp_path)
    Nvml(**{f"GPU_{n}": Gpu() for n in range(count)}).install(monkeypatch)
    ctx.queue.clock = lambda: NOON
    return ctx


def test_no_run_is_placed_on_a_reserved_device(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch, 2)
    reserve(ctx, "GPU-0")
    for name in ("a", "b"):
        submit(ctx, name, model=f"/models/{name}")
    place_runs(ctx)
    a, b = (runs.get(ctx.store, name) for name in "ab")
    assert (a.state, ctx.pools[a.pool or ""].setup.names, b.state) == ("starting", ("cuda:1",), "queued")
    assert b.waiting.startswith(
        "0 of 2 devices free; cuda:0 is reserved by alice (paper); `lorad devices release cuda:0` gives it"
    )


def test_run_joins_no_warm_pool_on_reserved_device(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch)
    submit(ctx, "a")
    place_runs(ctx)
    reserve(ctx, "GPU-0", seconds=7200)
    submit(ctx, "b")
    place_runs(ctx)
    assert [runs.get(ctx.store, name).state for name in "ab"] == ["starting", "queued"]
    waiting = runs.get(ctx.store, "b").waiting
    assert "cuda:0 is reserved by alice for 2h00m from when it is free (paper); `lorad" in waiting


def test_reservation_begins_when_other_daemons_left(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch)
    with taken(ctx.gpus.devices[0]):
        reserve(ctx, "GPU-0", seconds=60)
        assert pools.reservations(ctx.store)[0].began_at is None
    ctx.queue.clock = lambda: NOON + 100
    keep_set_aside(ctx)
    assert pools.reservations(ctx.store)[0].until == NOON + 160


def test_reservation_ends_by_itself(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = box(home, tmp_path, monkeypatch)
    reserve(ctx, "GPU-0", seconds=60)
    ctx.queue.clock = lambda: NOON + 59
    keep_set_aside(ctx)
    assert "cuda:0" in ctx.gpus.set_aside
    ctx.queue.clock = lambda: NOON + 60
    keep_set_aside(ctx)
    assert not ctx.gpus.set_aside and not pools.reservations(ctx.store)


def test_only_an_urgent_reservation_stops_runs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = box(home, tmp_path, monkeypatch, 2)
    submit(ctx, "a")
    place_runs(ctx)
    reserve(ctx, "GPU-0")
    reserve(ctx, "GPU-1", urgent=True)
    give_way(ctx)
    assert runs.get(ctx.store, "a").state == "starting"
    reserve(ctx, "GPU-0", urgent=True)
    give_way(ctx)
    a = runs.get(ctx.store, "a")
    assert (a.state, a.wanted) == ("stopping", "pause")
    assert a.yielded == "cuda:0 is reserved by alice from when it is free (paper)"


async def test_reservation_survives_another_daemon(home: Path) -> None:
    async with reconciling(home) as ctx:
        reserve(ctx, "cpu")
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until(lambda: "cpu is reserved by alice" in runs.get(ctx.store, "a").waiting)
        pools.release(ctx.store, "cpu", "cpu", by="alice")
        assert (await until_state(ctx, "a", "ended")).reason == "completed"


async def test_run_returns_after_an_urgent_reservation(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        await api.run("a")
        await until(lambda: runs.get(api.ctx.store, "a").step >= 1)
        made = await api("reserve", "cpu", ReserveRequest(why="paper", now=True))
        assert made.reservation.holder == "pool tiny-1 is there: run a"
        await until(lambda: runs.get(api.ctx.store, "a").state == "queued")
        await until(lambda: pools.reservations(api.ctx.store)[0].began_at)
        assert not api.ctx.pools["tiny-1"].process.is_up
        assert "reserved by" in (await api("show", "a")).waiting
        assert device_row((await api("devices"))[0])[-1].startswith("reserved by ")
        await api("release", "cpu")
        row = await until_state(api.ctx, "a", "ended")
        assert (row.reason, row.attempt, row.yielded) == ("completed", 2, None)


async def test_requests_for_devices_are_checked(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(NotFound, match="no device cuda:7"):
            await api("reserve", "cuda:7", ReserveRequest())
        with pytest.raises(SpecError, match="cannot be reserved until"):
            await api("reserve", "cpu", ReserveRequest(until=5.0))
        for beyond in (ReserveRequest(until=2.0**63), ReserveRequest(seconds=1e308)):
            with pytest.raises(SpecError, match=r"1e\+11|100000000000"):
                await api("reserve", "cpu", beyond)
        with pytest.raises(SpecError, match="seconds"):
            await api("reserve", "cpu", ReserveRequest(seconds=-1.0))
        with pytest.raises(Conflict, match="cpu is not reserved"):
            await api("release", "cpu")
        reserve(api.ctx, "cpu")
        with pytest.raises(Conflict, match="cpu is reserved by alice"):
            await api("reserve", "cpu", ReserveRequest())


async def test_reserving_anew_keeps_its_time(home: Path) -> None:
    async with serving(home) as api:
        await api("reserve", "cpu", ReserveRequest(seconds=3600.0, why="paper"))
        again = (await api("reserve", "cpu", ReserveRequest(now=True))).reservation
        assert (again.urgent, again.seconds, again.why) == (True, 3600.0, "paper")


@pytest.mark.system
@pytest.mark.long  # a run that is preempted makes room by the same code
def test_yielding_run_ends_as_if_never_disturbed() -> None:
    with world() as made:
        spec = made.spec(SMALL)
        made.run("alone", "trainer.steps=16")
        made.lorad("run", spec, "trainer.steps=16", "--name", "low", "--detach")
        made.reached("low", 1)
        driver = made.pid("low", "driver")
        os.kill(driver, signal.SIGSTOP)  # so that it is not through before the device is reserved
        told = made.lorad("devices", "reserve", "cpu", "--for", "2h", "--why", "paper", "--now").stderr
        assert "run low. Its runs stop at their next step." in told
        os.kill(driver, signal.SIGCONT)
        made.until(lambda: made.client.show("low").state == "queued", "low gave way")
        os.kill(made.client.status().pid, signal.SIGKILL)
        made.lorad("daemon", "start")
        assert "paper" in made.lorad("devices").stdout
        made.lorad("devices", "release", "cpu")
        made.until(lambda: made.client.show("low").state == "ended", "low is over")
        assert made.client.show("low").attempt == 2
        assert made.facts("low") == made.facts("alone")
