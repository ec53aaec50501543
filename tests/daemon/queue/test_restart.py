"""Restarts by themselves: after which ends, how soon, how often; and what is said of an end."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.queue.restart import delay, futile_attempts, wait_for_restart
from lorad.daemon.queue.tenants import has_joined, life_of
from lorad.daemon.runs.settle import by_its_word
from lorad.protocol.journal import EndFact
from lorad.states import EndReason, Move
from lorad.store import events, runs
from lorad.store.metrics import steps
from lorad.store.rows import RunRow
from tests.kit import daemon_world
from tests.kit.daemon_world import (
    behave,
    hold,
    open_context,
    reconciling,
    release,
    submit,
    until,
    until_state,
)

AGAIN = {"restart": "on-failure"}


def closed(ctx: Context) -> None:
    ctx.store.close()
    ctx.journal.close()


def power_cut(attempt: AttemptDir) -> None:
    """Leave what is left when the machine goes down under the process and comes back."""
    status = json.loads(attempt.status.read_bytes())
    os.kill(status["shim_pid"], signal.SIGKILL)
    os.killpg(status["pid"], signal.SIGKILL)
    attempt.status.write_text(json.dumps(status | {"boot_id": "another"}))


async def cut_at_step(home: Path, step: int, **sections: Any) -> None:
    hold(home, f"a@{step}")
    async with reconciling(home) as ctx:
        submit(ctx, "a", **sections)
        await until(
            lambda: runs.get(ctx.store, "a").state == "running" and runs.get(ctx.store, "a").step == step
        )
        there = runs.get(ctx.store, "a").attempt_dir, ctx.pools["tiny-1"].attempt()
    for attempt in there:
        power_cut(attempt)
    release(home)


async def test_run_lost_to_reboot_says_so_and_resumes(home: Path) -> None:
    await cut_at_step(home, 2)
    async with reconciling(home) as ctx:
        row = await until_state(ctx, "a", "ended")
        assert row.reason == "lost" and row.detail.startswith("the machine was restarted, at 20")
        runs.move(ctx.store, "a", Move.RESUME)
        ctx.loop.poke()
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, [step.step for step in steps(ctx.store, "a")]) == (
            "completed",
            [1, 2, 3, 4, 5, 6],
        )


async def test_restartable_run_continues_after_a_reboot(home: Path) -> None:
    await cut_at_step(home, 2, resources=AGAIN)
    async with reconciling(home) as ctx:
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.attempt, ctx.pools["tiny-1"].number) == ("completed", 2, 2)


async def test_reboot_is_not_held_against_a_run(home: Path) -> None:
    behave(home, driver={"seconds": 30})
    await cut_at_step(home, 0, resources=AGAIN)
    async with reconciling(home) as ctx:
        await until(lambda: runs.get(ctx.store, "a").attempt == 2)
        assert futile_attempts(ctx, "a", before=2) == 0


async def test_killed_driver_and_shim_are_no_reboot(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        status = json.loads(runs.get(ctx.store, "a").attempt_dir.status.read_bytes())
        os.kill(status["shim_pid"], signal.SIGKILL)
        os.killpg(status["pid"], signal.SIGKILL)
        assert (await until_state(ctx, "a", "ended")).detail == "the driver vanished without an exit code"


def test_restart_delay_doubles_up_to_a_limit(home: Path) -> None:
    ctx = open_context(home)
    ctx.patience = dataclasses.replace(ctx.patience, restart=1.0)
    assert [delay(ctx, futile) for futile in (0, 1, 2, 8, 9, 60)] == [1, 2, 4, 256, 300, 300]
    closed(ctx)


async def test_next_daemon_keeps_waiting_to_restart(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_world, "QUICK", dataclasses.replace(daemon_world.QUICK, restart=60.0))
    behave(home, driver={"crash_at": 3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources=AGAIN)
        await until(lambda: runs.get(ctx.store, "a").waiting == "restarts 60 s after attempt 1 was lost")
    ctx = open_context(home)
    assert wait_for_restart(ctx, runs.get(ctx.store, "a")) == "restarts 60 s after attempt 1 was lost"
    assert 50 < ctx.queue.not_before["a"] - time.monotonic() <= 60
    with ctx.store.write() as connection:
        connection.execute("UPDATE runs SET restart_at = restart_at - 61, waiting = 'in other words'")
    assert wait_for_restart(ctx, runs.get(ctx.store, "a")) == "in other words"
    ctx.queue.not_before.clear()
    assert wait_for_restart(ctx, runs.get(ctx.store, "a")) == ""
    assert runs.get(ctx.store, "a").restart_at is None
    closed(ctx)


async def test_who_resumes_by_hand_does_not_wait(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_world, "QUICK", dataclasses.replace(daemon_world.QUICK, restart=60.0))
    behave(home, driver={"crash_at": 3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources=AGAIN)
        await until(lambda: runs.get(ctx.store, "a").restart_at)
        behave(home)
        runs.move(ctx.store, "a", Move.END, reason=EndReason.STOPPED, by="me")
        runs.move(ctx.store, "a", Move.RESUME, by="me")
        ctx.loop.poke()
        assert (await until_state(ctx, "a", "ended")).reason == "completed"


async def test_restarts_are_counted_until_somebody_resumes(home: Path) -> None:
    behave(home, driver={"crash_at": 3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources=AGAIN | {"max_restarts": 1})
        row = await settled(ctx)
        assert (row.reason, row.attempt) == ("lost", 2)
        assert row.detail.endswith(
            "no more restarts after 1 (resources.max_restarts); `lorad resume a` continues"
        )
        runs.move(ctx.store, "a", Move.RESUME, by="me")
        assert runs.restarts(ctx.store, "a") == 0
        ctx.loop.poke()
        assert (await settled(ctx)).attempt == 4


async def settled(ctx: Context) -> RunRow:
    """The run, once it ended for good."""
    row: RunRow = await until(lambda: (r := runs.get(ctx.store, "a")).state == "ended" and r)
    return row


async def test_each_attempt_keeps_why_it_ended(home: Path) -> None:
    behave(home, driver={"crash_at": 3})
    async with reconciling(home) as ctx:
        hold(home, "a@2")
        submit(ctx, "a", resources=AGAIN)
        await until(lambda: runs.get(ctx.store, "a").step == 2)
        behave(home)  # as the next attempt is to
        release(home)
        await until_state(ctx, "a", "ended")
        assert [step.step for step in steps(ctx.store, "a")] == [1, 2, 3, 4, 5, 6]
        assert runs.attempts(ctx.store, "a")[1].resumed_from == 2
        details = [attempt.detail for attempt in runs.attempts(ctx.store, "a")]
        assert details == [
            "the driver exited with code 3; it left no error, and its last line was: the driver is out of "
            "luck",
            "6 steps",
        ]


async def test_clue_in_a_log_comes_with_advice(home: Path) -> None:
    behave(home, driver={"crash_at": 3, "says": "OSError: [Errno 28] No space left on device: 'samples'"})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        row = await until_state(ctx, "a", "ended")
        assert row.detail.startswith(
            "the driver exited with code 3: no space is left on a disk. `lorad gc` deletes"
        )


async def test_drivers_own_reason_comes_with_advice(home: Path) -> None:
    behave(home, driver={"fails_at": 3, "says": "cannot write: No space left on device"})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        row = await until_state(ctx, "a", "ended")
        assert row.reason == "failed"
        assert row.detail.startswith("cannot write: No space left on device; `lorad gc` deletes")


async def test_lost_run_adds_why_its_pool_ended(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer={"steps": 1000})
        await until_state(ctx, "a", "running")
        row, pool = runs.get(ctx.store, "a"), ctx.pools["tiny-1"].attempt()
        lost = EndFact("lost", "it is gone")
        assert by_its_word(row, lost, life_of(ctx, row))[1] == "it is gone"
        pool.killed.write_text(json.dumps({"why": "pool tiny-1 was hung; killed"}))
        assert by_its_word(row, lost, life_of(ctx, row))[1] == "it is gone; pool tiny-1 was hung; killed"
        ctx.processes.kill_group(pool)
        await until(lambda: ctx.processes.inspect(pool).is_over)
        assert by_its_word(row, lost, life_of(ctx, row))[1] == "it is gone; pool tiny-1 was hung; killed"


async def test_oom_killed_driver_is_reported_as_such(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        attempt = runs.get(ctx.store, "a").attempt_dir

    os.kill(json.loads(attempt.status.read_bytes())["pid"], signal.SIGKILL)
    status = await until(lambda: (s := json.loads(attempt.status.read_bytes()))["ended_at"] and s)
    attempt.status.write_text(json.dumps(status | {"oom_before": 3, "oom_after": 4}))
    async with reconciling(home) as ctx:
        row = await until_state(ctx, "a", "ended")
        words = "the driver was killed, perhaps by the kernel: the machine ran out of memory meanwhile. "
        assert row.detail.startswith(words)


async def together(ctx: Context, home: Path, *, crash: bool | str) -> None:
    """Have `a` start a pool, `b` join it before it is ready, and that life of the pool, or each, give up."""
    behave(home, pool={"waits": True})
    submit(ctx, "a")
    await until(lambda: "tiny-1" in ctx.pools and ctx.pools["tiny-1"].process.is_up)
    submit(ctx, "b")
    await until(lambda: runs.get(ctx.store, "b").state == "starting" and has_joined(runs.get(ctx.store, "b")))
    behave(home, pool={"crash": crash})


async def test_run_that_joined_a_dying_pool_gets_another(home: Path) -> None:
    async with reconciling(home) as ctx:
        await together(ctx, home, crash="0001")
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, "the base does not fit into memory" in row.detail) == ("failed", True)
        row = await until_state(ctx, "b", "ended")
        assert (row.reason, row.attempt, runs.restarts(ctx.store, "b")) == ("completed", 2, 0)


async def test_run_whose_own_pool_gives_up_fails(home: Path) -> None:
    async with reconciling(home) as ctx:
        await together(ctx, home, crash=True)
        row = await until_state(ctx, "b", "ended")
        assert (row.reason, row.attempt) == ("failed", 2)
        assert "the base does not fit into memory" in row.detail
        [excused] = events.of_kind(ctx.store, "b", "excused")
        assert excused["why"] == "pool tiny-1 ended as the run joined it"
