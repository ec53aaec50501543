"""Programs outside of lorad on a GPU: a run that yields to them gives it back, and returns when they left."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Queue
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.occupancy import GpuProcess, Sight
from lorad.daemon.process.processes import Processes
from lorad.daemon.queue.neighbours import watch_neighbours
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.set_aside import give_way
from lorad.store import runs
from lorad.store.versions import versions
from tests.kit.daemon_world import (
    Api,
    behave,
    open_context,
    pid_of,
    reconciling,
    serving,
    submit,
    until,
    until_state,
)
from tests.kit.fakes.gpu_kit import Gpu, Nvml, gpus, me
from tests.kit.world import SMALL

YIELDS: dict[str, Any] = {"resources": {"yield_to": "foreign"}}
QUICK = Queue(foreign_after=0.0, foreign_settle=0.0)
CALM = Queue(foreign_after=5.0, foreign_settle=60.0)


class Clock:
    """Moves the monotonic time of what lorad saw."""

    def __init__(self, ctx: Context, nvml: Nvml) -> None:
        self.ctx, self.nvml = ctx, nvml

    def later(self, seconds: float, *, there: bool) -> None:
        """Let time go by, with or without a program on the GPU."""
        self.nvml.gpus["GPU-0"] = Gpu(computing=me()) if there else Gpu()
        for name, one in self.ctx.gpus.neighbours.items():
            left = None if one.left is None else one.left - seconds
            self.ctx.gpus.neighbours[name] = replace(one, since=one.since - seconds, left=left)
        self.ctx.gpus.sights.seen = {}
        watch_neighbours(self.ctx)
        give_way(self.ctx)


@pytest.fixture
def clock(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    ctx = open_context(home, queue=CALM)
    gpus(ctx, 1, monkeypatch, tmp_path)
    yield Clock(ctx, Nvml(GPU_0=Gpu()).install(monkeypatch))


def state(clock: Clock, name: str = "a") -> str:
    return str(runs.get(clock.ctx.store, name).state)


def test_run_yields_once_somebody_stays(clock: Clock) -> None:
    submit(clock.ctx, "a", **YIELDS)
    submit(clock.ctx, "stays")
    place_runs(clock.ctx)
    clock.later(0, there=True)
    clock.later(4, there=True)
    assert state(clock) == "starting"
    clock.later(2, there=True)
    assert (state(clock), state(clock, "stays")) == ("stopping", "starting")
    why = runs.get(clock.ctx.store, "a").yielded or ""
    assert why.startswith("cuda:0 is in use by py") and f"(pid {os.getpid()}, " in why and "12.0 GiB" in why


def test_short_visits_disturb_nobody(clock: Clock) -> None:
    submit(clock.ctx, "a", **YIELDS)
    place_runs(clock.ctx)
    for _ in range(5):
        clock.later(4, there=True)
        clock.later(4, there=False)
    assert state(clock) == "starting"


def test_run_waits_until_device_stays_free(clock: Clock) -> None:
    submit(clock.ctx, "a", **YIELDS)
    clock.later(0, there=True)
    place_runs(clock.ctx)
    assert "to whom it yields" in runs.get(clock.ctx.store, "a").waiting
    for seconds, there in ((10, False), (50, True), (10, False), (50, False)):
        clock.later(seconds, there=there)
        place_runs(clock.ctx)
        assert state(clock) == "queued"
    assert "left cuda:0; it starts when nobody else was there for 60 s" in (
        runs.get(clock.ctx.store, "a").waiting
    )
    clock.later(11, there=False)
    place_runs(clock.ctx)
    assert state(clock) == "starting"


def test_unreadable_gpu_moves_nobody(clock: Clock) -> None:
    submit(clock.ctx, "a", **YIELDS)
    place_runs(clock.ctx)
    clock.later(0, there=True)
    clock.nvml.refuses = {"nvmlDeviceGetHandleByUUID"}
    for _ in range(3):
        clock.later(100, there=True)
    assert state(clock) == "starting" and clock.ctx.gpus.neighbours["cuda:0"].left is None


def test_processes_of_lorad_are_not_foreign() -> None:
    someone = GpuProcess(7, "bob", "python", 1 << 30, True, False)
    mine = (replace(someone, ours=True), replace(someone, lorads=True))
    assert Sight(0.0, processes=(*mine, someone)).foreign() == [someone]


@pytest.mark.system
async def test_yielded_gpu_has_no_pool_left(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(GPU_0=Gpu()).install(monkeypatch)
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, queue=QUICK) as ctx:
        gpus(ctx, 1, monkeypatch, tmp_path)
        submit(ctx, "a", trainer={"steps": 100}, **YIELDS)  # 30 s, in which the GPU is looked at
        await until(lambda: runs.get(ctx.store, "a").step >= 1)
        nvml.gpus["GPU-0"] = Gpu(computing=me())
        await until(lambda: runs.get(ctx.store, "a").state == "queued")
        await until(lambda: not ctx.pools["tiny-1"].process.is_up)
        behave(home)
        nvml.gpus["GPU-0"] = Gpu()
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.attempt) == ("completed", 2)


@pytest.mark.system
@pytest.mark.long
async def test_yielding_run_learns_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that computes on the CPU stands for one on a GPU; only NVML is a stand-in."""
    nvml = Nvml(GPU_0=Gpu()).install(monkeypatch)
    async with serving(home, queue=QUICK) as api:
        gpus(api.ctx, 1, monkeypatch, tmp_path)
        api.ctx.gpus.devices[:] = [Device("cpu", "a CPU", 1 << 33, "GPU-0")]
        api.ctx.processes = Processes()
        await api.run("alone", "trainer.steps=16", spec=SMALL)
        await api.until("alone", "ended")
        await api.run("a", "trainer.steps=16", "resources.yield_to=foreign", spec=SMALL)
        await until(lambda: runs.get(api.ctx.store, "a").step >= 1)
        os.kill(driver := pid_of(api.ctx, "a"), signal.SIGSTOP)  # so that it is not through before
        nvml.gpus["GPU-0"] = Gpu(computing=me())
        await until(lambda: runs.get(api.ctx.store, "a").state == "stopping")
        os.kill(driver, signal.SIGCONT)
        await until(lambda: runs.get(api.ctx.store, "a").state == "queued")
        nvml.gpus["GPU-0"] = Gpu()
        assert (await api.until("a", "ended")).attempt == 2
        assert digest(api, "a") == digest(api, "alone")


def digest(api: Api, run: str) -> str:
    newest = max(versions(api.ctx.store, run), key=lambda version: version.version)
    return str(newest.sha256)
