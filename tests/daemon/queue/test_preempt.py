"""Runs of lower priority make room at a step, with a checkpoint, only where it helps, and continue
afterwards.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Limit, Queue
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.control import kill, pause, stop
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.restart import futile_attempts, queue_again, restart
from lorad.daemon.runs import sweeps
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.metrics import steps
from tests.kit.daemon_world import (
    hold,
    open_context,
    reconciling,
    release,
    submit,
    until,
    until_state,
)
from tests.kit.fakes.gpu_kit import Gpu, Nvml, gpus, me
from tests.kit.world import SMALL, world

LONG = "trainer.steps=16"
HIGH: dict[str, Any] = {"resources": {"priority": 5}}


def told(ctx: Context, name: str) -> str:
    return str(run_view(ctx, runs.get(ctx.store, name)).waiting)


def states(ctx: Context, *names: str) -> list[str]:
    return [str(runs.get(ctx.store, name).state) for name in names]


def paused(ctx: Context, name: str) -> None:
    """Queue the run again as `settle` does when the driver has ended."""
    run = runs.get(ctx.store, name)
    with ctx.store.write():
        runs.move(ctx.store, name, Move.PAUSE)
        queue_again(ctx, run)


async def test_preempted_run_continues_after_the_urgent_one(home: Path) -> None:
    hold(home, "low@2", "high")
    async with reconciling(home) as ctx:
        submit(ctx, "low")
        await until(lambda: runs.get(ctx.store, "low").step == 2)
        submit(ctx, "high", model="/models/other", **HIGH)
        await until(lambda: told(ctx, "low") == "being preempted by high")
        hold(home, "high")
        await until(
            lambda: told(ctx, "low").startswith("preempted by high; pool other-1 is busy with run high")
        )
        release(home)
        high, low = await until_state(ctx, "high", "ended"), await until_state(ctx, "low", "ended")
        assert (high.reason, low.reason, low.preempted) == ("completed", "completed", None)
        assert (high.ended_at or 0.0) < (low.ended_at or 0.0) and low.attempt == 2
        assert [step.step for step in steps(ctx.store, "low")] == [1, 2, 3, 4, 5, 6]
        assert runs.attempts(ctx.store, "low")[1].resumed_from


def test_freed_place_belongs_to_the_preempting_run(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "low")
    place_runs(ctx)
    submit(ctx, "usual")
    submit(ctx, "high", resources={"priority": 5, "exclusive": True})
    place_runs(ctx)
    assert states(ctx, "low", "usual", "high") == ["stopping", "queued", "queued"]
    place_runs(ctx)
    assert told(ctx, "high") == "run low stops at its next step to make room in pool tiny-1"
    paused(ctx, "low")
    place_runs(ctx)
    assert states(ctx, "low", "usual", "high") == ["queued", "queued", "starting"]
    assert told(ctx, "low").startswith("preempted by high; run high has pool tiny-1 for itself")


def test_fewest_lowest_youngest_runs_are_preempted(home: Path) -> None:
    ctx = open_context(home)
    large: dict[str, Any] = {"rollout": {"max_staleness": 14}}
    submit(ctx, "older", **large)
    submit(ctx, "younger", **large)
    submit(ctx, "better", resources={"priority": 1}, **large)
    place_runs(ctx)
    submit(ctx, "high", **HIGH, **large)
    place_runs(ctx)
    place_runs(ctx)
    assert states(ctx, "older", "younger", "better") == ["starting", "stopping", "starting"]
    paused(ctx, "younger")
    place_runs(ctx)
    assert states(ctx, "younger", "high") == ["queued", "starting"]


def test_small_run_stays_when_only_large_helps(home: Path) -> None:
    ctx = open_context(home)
    large: dict[str, Any] = {"rollout": {"max_staleness": 14}}
    for name in ("one", "two"):
        submit(ctx, name, resources={"priority": 1}, **large)
    submit(ctx, "large", **large)
    submit(ctx, "small")
    place_runs(ctx)
    submit(ctx, "high", **HIGH, **large)
    place_runs(ctx)
    assert states(ctx, "one", "two", "large", "small") == ["starting", "starting", "stopping", "starting"]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ({"resources": {"preemptible": False}}, {}),
        ({"resources": {"priority": 5}}, {}),
        ({"resources": {"priority": 6}}, {}),
        ({}, {"model": "builtin:tiny", "lora": {"rank": 1000}}),
    ],
)
def test_no_run_is_preempted_without_right_or_need(
    home: Path, low: dict[str, Any], high: dict[str, Any]
) -> None:
    ctx = open_context(home)
    submit(ctx, "low", **low)
    place_runs(ctx)
    submit(ctx, "high", **({"model": "/models/other"} | HIGH | high))
    place_runs(ctx)
    assert states(ctx, "low") == ["starting"]


def test_disabled_preemption_or_limits_stop_nobody(home: Path) -> None:
    for queue in (Queue(preemption=False), Queue(limits=Limit(runs=1))):
        ctx = open_context(home / str(queue.preemption), queue=queue)
        submit(ctx, "low")
        place_runs(ctx)
        submit(ctx, "high", model="/models/other", **HIGH)
        place_runs(ctx)
        assert states(ctx, "low", "high") == ["starting", "queued"]


def test_nobody_is_stopped_beside_whom_somebody_else_computes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = open_context(home)
    gpus(ctx, 2, monkeypatch, tmp_path)
    nvml = Nvml(GPU_0=Gpu(), GPU_1=Gpu(computing=me())).install(monkeypatch)
    submit(ctx, "low")
    place_runs(ctx)
    submit(ctx, "wide", trainer={"backend": "fsdp", "steps": 6, "dp": 2}, **HIGH)
    place_runs(ctx)
    assert states(ctx, "low") == ["starting"]
    nvml.gpus["GPU-1"], ctx.gpus.sights.seen = Gpu(), {}
    place_runs(ctx)
    assert states(ctx, "low") == ["stopping"]


def test_cheapest_device_is_cleared_for_preemption(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = open_context(home)
    gpus(ctx, 3, monkeypatch, tmp_path)
    for number, priority in enumerate((2, 0, 1)):
        submit(ctx, f"r{number}", model=f"/models/{number}", resources={"priority": priority})
        place_runs(ctx)
    submit(ctx, "high", model="/models/other", **HIGH)
    submit(ctx, "next", model="/models/more", resources={"priority": 4})
    place_runs(ctx)
    place_runs(ctx)
    assert states(ctx, "r0", "r1", "r2") == ["starting", "stopping", "stopping"]
    paused(ctx, "r1")
    place_runs(ctx)
    assert states(ctx, "high", "next") == ["starting", "queued"]
    assert runs.get(ctx.store, "high").pool == "other-1" and ctx.pools["other-1"].setup.device == "cuda:1"


@pytest.mark.parametrize(("handler", "wanted"), [(pause, "pause"), (stop, "stop"), (kill, "kill")])
async def test_user_request_overrides_a_pending_preemption(home: Path, handler: Any, wanted: str) -> None:
    class Asked(Call):
        run = "low"

    ctx = open_context(home)
    submit(ctx, "low")
    place_runs(ctx)
    submit(ctx, "high", model="/models/other", **HIGH)
    place_runs(ctx)
    assert runs.get(ctx.store, "low").preempted == "high"
    await handler(ctx, Asked(None, Caller(0, "me"), None))  # type: ignore[arg-type]
    row = runs.get(ctx.store, "low")
    assert (row.wanted, row.preempted) == (wanted, None)
    place_runs(ctx)
    assert runs.get(ctx.store, "low").preempted is None
    if wanted == "pause":
        paused(ctx, "low")
        assert states(ctx, "low") == ["paused"]


def test_preempted_run_ended_meanwhile_is_over(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "low")
    place_runs(ctx)
    submit(ctx, "high", model="/models/other", **HIGH)
    place_runs(ctx)
    paused(ctx, "low")
    runs.move(ctx.store, "low", Move.END, reason=EndReason.STOPPED)
    assert (runs.get(ctx.store, "low").preempted, told(ctx, "low")) == (None, "")


def test_run_ended_while_preempted_is_not_restarted(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "low", resources={"restart": "on-failure"})
    place_runs(ctx)
    submit(ctx, "high", model="/models/other", **HIGH)
    place_runs(ctx)
    sweeps.end(ctx, runs.get(ctx.store, "low"), "stopped by halving")
    low = runs.get(ctx.store, "low")
    runs.move(ctx.store, "low", Move.END, reason=EndReason.LOST)
    restart(ctx, low, EndReason.LOST, None, never_began=False)
    assert states(ctx, "low") == ["ended"]


def test_preemption_before_a_step_is_no_failure(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "low")
    for number in range(1, 4):
        runs.begin_attempt(ctx.store, "low", resumed_from=None)
        runs.end_attempt(ctx.store, "low", number, exit_code=0, signal=None, reason="stopped")
    assert futile_attempts(ctx, "low") == 0


@pytest.mark.system
def test_preempted_run_ends_as_if_never_disturbed() -> None:
    with world() as made:
        spec = made.spec(SMALL)
        made.run("alone", LONG)
        made.lorad("run", spec, LONG, "--name", "low", "--detach")
        made.reached("low", 1)
        alone = ("resources.priority=5", "resources.exclusive=true", "trainer.steps=1")
        driver = made.pid("low", "driver")
        os.kill(driver, signal.SIGSTOP)  # so that it is not through before the other has come
        made.lorad("run", spec, *alone, "--name", "high", "--detach")
        made.until(lambda: made.client.show("low").waiting == "being preempted by high", "low makes room")
        os.kill(driver, signal.SIGCONT)
        made.until(lambda: made.client.show("low").state == "ended", "low is over")
        low = made.client.show("low")
        assert low.reason == "completed" and low.attempt == 2 and low.preempted is None
        assert made.client.show("high").reason == "completed"
        assert made.facts("low") == made.facts("alone")
