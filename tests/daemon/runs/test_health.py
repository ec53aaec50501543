"""Processes that live and do nothing are distinguished from slow ones, and replaced."""

import asyncio
import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Supervision
from lorad.box.paths import AttemptDir
from lorad.children.stacks import spy
from lorad.client.words import why
from lorad.daemon import health
from lorad.daemon.context import Context
from lorad.daemon.health import put_down
from lorad.daemon.process import stacks
from lorad.daemon.process.pulse import Pulse, was_away
from lorad.daemon.runs.end_clues import killed_for
from lorad.daemon.troubles import Item
from lorad.protocol.heartbeat import Beat, read_beat
from lorad.store import runs
from lorad.store.metrics import steps
from tests.kit.daemon_world import (
    behave,
    hold,
    open_context,
    pid_of,
    reconciling,
    release,
    serving,
    submit,
    until,
    until_state,
    want,
)
from tests.kit.world import world

LIMITS = Supervision(hang=10.0, stall=60.0)
QUICK: dict[str, Any] = {"supervision": Supervision(hang=2.0, stall=600.0)}
# where whoever is alone is to be accused
SOON: dict[str, Any] = {"supervision": Supervision(hang=1.0, stall=600.0)}
LONG = {"steps": 1000}


def beat(at: float, progress: int = 0, doing: str = "train") -> Beat:
    return Beat(at, progress, doing)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(stacks, "spy", lambda: None)


def test_silence_is_a_hang_until_a_beat() -> None:
    pulse = Pulse(beat(0), 100.0, 100.0)
    assert pulse.trouble(109.0, LIMITS) == ""
    assert pulse.trouble(111.0, LIMITS) == "was hung: no heartbeat for 11 s"
    pulse.see(beat(1), 111.0)
    assert pulse.trouble(112.0, LIMITS) == ""


def test_only_work_without_progress_is_stuck() -> None:
    pulse = Pulse(beat(0), 0.0, 0.0)
    for now in range(1, 62):
        pulse.see(beat(now), now)
    assert pulse.trouble(61.0, LIMITS) == "was stuck: no progress for 61 s, at 'train'"
    pulse.see(beat(62, doing=""), 62.0)
    assert pulse.trouble(70.0, LIMITS) == ""
    pulse.see(beat(71, doing="train"), 71.0)
    assert pulse.trouble(72.0, LIMITS) == ""  # what it begins now has its whole time


def test_the_seconds_of_a_phase_are_told() -> None:
    pulse = Pulse(Beat(0, 0, "", "training"), 0.0, 0.0)
    assert [pulse.activity.in_words(now) for now in (1.0, 34.0)] == ["training", "training, 34s"]
    pulse.see(Beat(1, 1, "", "sampling 0 of 64"), 40.0)
    pulse.see(Beat(2, 1, "", "sampling 41 of 64, 812 tok/s"), 50.0)
    assert pulse.activity.in_words(90.0) == "sampling 41 of 64, 812 tok/s"
    pulse.see(Beat(3, 1, "", "publishing"), 95.0)
    assert pulse.activity.in_words(98.0) == "publishing, 3s"


def test_slow_progress_is_progress() -> None:
    pulse = Pulse(beat(0), 0.0, 0.0)
    for now in range(1, 200):
        pulse.see(beat(now, progress=now // 50), now)
        assert pulse.trouble(now, LIMITS) == ""


def test_a_daemon_that_slept_accuses_nobody() -> None:
    assert not was_away(100.0, 104.0, LIMITS) and was_away(100.0, 111.0, LIMITS)
    pulse = Pulse(beat(0), 0.0, 0.0)
    pulse.begin_again(1000.0)
    assert pulse.trouble(1009.0, LIMITS) == ""


async def test_only_silence_while_daemon_looks_is_fatal(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, attempt = open_context(home), AttemptDir(home)
    put: list[None] = []
    monkeypatch.setattr(health, "watched", lambda _: [(attempt, ("the driver", Item("run a")))])
    monkeypatch.setattr(ctx, "spawn", lambda work: put.append(work.close()))
    attempt.heartbeat.write_text('{"at": 1, "progress": 1, "doing": ""}')
    health.heal(ctx)

    def later(slept: float, silent: float) -> bool:
        ctx.processes.looked_at, ctx.processes.pulses[attempt].beat_at = (
            time.monotonic() - slept,
            time.monotonic() - silent,
        )
        health.heal(ctx)
        return bool(put)

    assert not later(slept=1000, silent=1000)
    assert not later(slept=5, silent=100)
    with monkeypatch.context() as patch:
        patch.setattr(health, "is_full", lambda _: True)  # perhaps it could not write its heartbeat
        assert not later(slept=5, silent=130)
    assert later(slept=5, silent=130)
    ctx.store.close()
    ctx.journal.close()


async def test_a_log_that_takes_no_stacks_saves_nobody(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(attempt: AttemptDir) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(health, "dump_stacks", full)
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, **SOON) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
        os.kill(pid_of(ctx, "a"), signal.SIGSTOP)
        row = await until_state(ctx, "a", "ended")
        assert row.reason == "lost" and row.detail.startswith("the driver was hung: no heartbeat for ")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"at": 1}', b'{"at": 1, "progress": Infinity, "doing": ""}']
)
def test_a_heartbeat_that_is_none_is_not_believed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "heartbeat").write_bytes(content)
    assert read_beat(tmp_path / "heartbeat") is None


def test_a_heartbeat_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text('{"at": 1, "progress": 1, "doing": ""}')
    (tmp_path / "heartbeat").symlink_to(tmp_path / "real")
    assert read_beat(tmp_path / "real") is not None and read_beat(tmp_path / "heartbeat") is None
    os.mkfifo(tmp_path / "pipe")
    assert read_beat(tmp_path / "pipe") is None


async def beats(ctx: Context, name: str) -> None:
    await until_state(ctx, name, "running")
    await until(lambda: runs.get(ctx.store, name).attempt_dir in ctx.processes.pulses)


async def test_hung_driver_is_replaced_when_wanted(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, **QUICK) as ctx:
        submit(ctx, "a", resources={"restart": "on-failure"})
        await until(lambda: runs.get(ctx.store, "a").step >= 2)
        os.kill(pid_of(ctx, "a"), signal.SIGSTOP)
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.attempt, len(steps(ctx.store, "a"))) == ("completed", 2, 6)
        lost = runs.attempts(ctx.store, "a")[0]
        assert lost.signal == signal.SIGKILL and "the driver was hung: no heartbeat" in lost.detail
        assert ctx.pools["tiny-1"].number == 1


@pytest.mark.system
async def test_stopped_pool_is_replaced_with_its_tenants(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, **QUICK) as ctx:
        for name in ("a", "b"):
            submit(ctx, name, trainer={"steps": 30}, resources={"restart": "on-failure"})
        await until(lambda: min(runs.get(ctx.store, name).step for name in ("a", "b")) >= 2)
        await until(lambda: ctx.pools["tiny-1"].attempt() in ctx.processes.pulses)
        os.kill(ctx.pools["tiny-1"].process.pid or 0, signal.SIGSTOP)
        for name in ("a", "b"):
            row = await until_state(ctx, name, "ended")
            assert (row.reason, row.attempt) == ("completed", 2)
            assert "pool tiny-1 was hung: no heartbeat" in runs.attempts(ctx.store, name)[0].detail
        assert ctx.pools["tiny-1"].number == 2


async def test_slow_and_beatless_drivers_are_left_alone(home: Path) -> None:
    """Both at once: each takes longer for its step than anybody may be silent."""
    async with reconciling(home, **QUICK) as ctx:
        for name, silent in (("slow", False), ("silent", True)):
            behave(home, driver={"seconds": 3.5, "silent": silent})
            submit(ctx, name, trainer={"steps": 1})
            await until_state(ctx, name, "running")
        for name in ("slow", "silent"):
            row = await until_state(ctx, name, "ended")
            assert (row.reason, row.attempt) == ("completed", 1)
        assert [pool.number for pool in ctx.pools.values()] == [1]


async def test_a_driver_that_gets_nowhere_is_stuck(home: Path) -> None:
    behave(home, driver={"stuck_at": 3})
    async with reconciling(home, supervision=Supervision(hang=60.0, stall=0.8)) as ctx:
        submit(ctx, "a")
        row = await until_state(ctx, "a", "ended")
        assert row.reason == "lost" and "the driver was stuck: no progress for " in row.detail
        assert "at 'step'; killed" in row.detail


async def test_hung_driver_asked_to_pause_is_paused(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, **SOON) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
        os.kill(pid_of(ctx, "a"), signal.SIGSTOP)
        want(ctx, "a", "pause")
        row = await until_state(ctx, "a", "paused")
        assert "the driver was hung" in row.detail


async def test_next_daemon_knows_reason_of_a_kill(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, **QUICK) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
    ctx = open_context(home)
    attempt = runs.get(ctx.store, "a").attempt_dir
    os.kill(pid_of(ctx, "a"), signal.SIGSTOP)
    told = read_beat(attempt.heartbeat)
    assert told is not None
    ctx.processes.pulses[attempt] = Pulse(told, time.monotonic() - 500, time.monotonic())
    ctx.config = type(ctx.config)(supervision=Supervision(hang=100.0))
    await put_down(ctx, attempt, "the driver")  # and this daemon dies before it hears of the end
    ctx.store.close()
    ctx.journal.close()
    async with reconciling(home) as ctx:
        assert (
            await until_state(ctx, "a", "ended")
        ).detail == "the driver was hung: no heartbeat for 500 s; killed"


async def test_who_comes_back_before_the_kill_is_spared(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
        attempt = runs.get(ctx.store, "a").attempt_dir
        long_ago = time.monotonic() - 1000.0
        ctx.processes.pulses[attempt] = Pulse(beat(0), long_ago, long_ago)  # its file has another one
        await put_down(ctx, attempt, "the driver")
        assert ctx.processes.inspect(attempt).phase == "alive" and not attempt.killed.exists()


async def test_next_daemon_forgets_an_uncompleted_kill(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
        attempt = runs.get(ctx.store, "a").attempt_dir
        attempt.killed.write_text(json.dumps({"why": "it was hung"}))
    async with reconciling(home) as ctx:
        await until(lambda: not killed_for(attempt))


async def test_stopped_shim_is_woken_to_report_end(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home, **SOON) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
        attempt = runs.get(ctx.store, "a").attempt_dir
        shim = json.loads(attempt.status.read_bytes())["shim_pid"]
        for pid in (shim, pid_of(ctx, "a")):
            os.kill(pid, signal.SIGSTOP)
        row = await until_state(ctx, "a", "ended")
        assert "was hung" in row.detail and runs.attempts(ctx.store, "a")[0].signal == signal.SIGKILL


async def test_stopped_shim_reports_end_of_killed_driver(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer=LONG)
        await beats(ctx, "a")
        os.kill(
            json.loads(runs.get(ctx.store, "a").attempt_dir.status.read_bytes())["shim_pid"], signal.SIGSTOP
        )
        os.kill(pid_of(ctx, "a"), signal.SIGKILL)
        row = await until_state(ctx, "a", "ended")
        assert "SIGKILL" in row.detail and "hung" not in row.detail


async def test_where_it_hangs_is_in_its_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if spy() is None:
        pytest.skip("py-spy is not installed")
    behave(home, driver={"stuck_at": 2})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await beats(ctx, "a")
        attempt = runs.get(ctx.store, "a").attempt_dir
        await until(lambda: (told := read_beat(attempt.heartbeat)) and told.progress)
        os.kill(pid_of(ctx, "a"), signal.SIGSTOP)
        await asyncio.to_thread(stacks.dump_stacks, attempt)
        text = attempt.log.read_text()
        if "Permission" in text:
            pytest.skip("py-spy may not look at other processes here")
        assert "which hangs" in text and "drive (" in text


@pytest.mark.system
def test_real_run_survives_hung_driver_and_pool() -> None:
    with world() as made:
        made.home.root.mkdir()
        made.home.config.write_text("supervision: {hang: 6}")
        asked = ("trainer.steps=10000", "resources.restart=on-failure")
        made.lorad("run", made.spec(), *asked, "--name", "shaken", "--detach")
        made.reached("shaken", 3)
        pool = made.client.show("shaken").pool
        for role in ("driver", "pool"):
            os.kill(made.pid("shaken", role), signal.SIGSTOP)
        made.until(lambda: made.client.show("shaken").attempt > 1, "the driver is replaced")
        made.reached("shaken", made.client.show("shaken").step + 3)
        made.lorad("stop", "shaken")
        run = made.over("shaken")
        assert run.reason == "stopped"
        assert [step.step for step in made.client.steps("shaken")] == list(range(1, run.step + 1))
        lost = [attempt.detail for attempt in run.attempts[:-1]]
        who = [why.partition(" was hung: no heartbeat")[0] for why in lost]
        # by who is found first
        assert who in (["the driver"], [f"pool {pool}"], ["the driver", f"pool {pool}"])
        assert f"attempt    1: fresh, lost: {lost[0]}" in made.lorad("show", "shaken").stdout
        assert f"pool {pool} was hung: no heartbeat" in made.home.daemon_log.read_text()


async def test_answers_say_what_a_run_is_doing(home: Path) -> None:
    behave(home, driver={"tells": "sampling 41 of 64"})
    hold(home)
    async with serving(home) as api:
        await api.run("a")
        await until(lambda: api.ctx.processes.doing == {"a": "sampling 41 of 64"})
        (listed,) = await api("list")
        assert (await api("show", "a")).doing == listed.doing == why(listed) == "sampling 41 of 64"
        release(home)
        ended = await api.until("a", "ended")
        await until(lambda: api.ctx.processes.doing == {})
        assert ended.doing == why(ended) == ""


async def test_a_waiting_run_says_what_its_pool_does(home: Path) -> None:
    hold(home)
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        pool = api.ctx.pools["tiny-1"]
        now = time.monotonic()
        pulse = Pulse(Beat(0, 0, "", "loading tiny"), now - 75.0, now)
        run = runs.get(api.ctx.store, "a")
        api.ctx.processes.pulses = {pool.attempt(): pulse}
        assert health.activity_of(api.ctx, run).startswith("loading tiny, 1m1")
        api.ctx.processes.pulses[run.attempt_dir] = Pulse(Beat(0, 0, "", "training"), now, now)
        assert health.activity_of(api.ctx, run).startswith("training")
        release(home)
        await api.until("a", "ended")
