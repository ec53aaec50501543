"""The reconcile loop with processes that are real and small."""

import os
import signal
import time
from pathlib import Path

import pytest

from lorad.daemon.context import Context
from lorad.daemon.guarded import each
from lorad.daemon.journal import read
from lorad.daemon.loop import REST, Loop
from lorad.daemon.process.processes import log_end, read_status
from lorad.daemon.queue.place import place_runs
from lorad.daemon.storage import budget
from lorad.daemon.storage.prune import prune
from lorad.daemon.troubles import Item
from lorad.errors import LoradError
from lorad.states import Move
from lorad.store import events, runs
from lorad.store.checkpoints import checkpoints
from lorad.store.metrics import steps
from tests.kit.daemon_world import behave, open_context, pid_of, reconciling, submit, until, until_state, want


async def test_a_queued_run_is_placed_runs_and_completes(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.step, row.pool) == ("completed", 6, "tiny-1")
        assert [step.step for step in steps(ctx.store, "a")] == [1, 2, 3, 4, 5, 6]
        assert runs.attempts(ctx.store, "a")[0].exit_code == 0


async def test_run_waits_for_exclusive_one_then_reuses_pool(
    home: Path,
) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources={"exclusive": True})
        submit(ctx, "b")
        waiting = await until(lambda: runs.get(ctx.store, "b").waiting)
        assert waiting == "run a has pool tiny-1 for itself; starts when it ends"
        row = await until_state(ctx, "b", "ended")
        assert (row.reason, row.waiting, ctx.pools["tiny-1"].number) == ("completed", "", 1)


async def test_priority_goes_before_age(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "first", resources={"exclusive": True})
        submit(ctx, "low", resources={"exclusive": True})
        submit(ctx, "high", resources={"exclusive": True, "priority": 5})
        ends = [(await until_state(ctx, name, "ended")).started_at or 0.0 for name in ("high", "low")]
        assert ends[0] < ends[1]


async def test_an_idle_pool_makes_room_for_another_base(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
        submit(ctx, "b", model="/models/other")
        row = await until_state(ctx, "b", "ended")
        assert (row.reason, row.pool) == ("completed", "other-1")
        assert not ctx.pools["tiny-1"].process.is_up


async def test_unstartable_pool_fails_run_with_its_words(home: Path) -> None:
    behave(home, pool={"crash": True})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        row = await until_state(ctx, "a", "ended")
        assert row.reason == "failed"
        assert "the base does not fit into memory" in row.detail


async def test_pause_finishes_the_step_checkpoints_and_resumes(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until(lambda: runs.get(ctx.store, "a").step >= 1)
        want(ctx, "a", "pause")
        paused = await until_state(ctx, "a", "paused")
        assert [c.step for c in checkpoints(ctx.store, "a")][-1] == paused.step < 6
        runs.move(ctx.store, "a", Move.RESUME)
        ctx.loop.poke()
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.attempt, row.step) == ("completed", 2, 6)
        assert runs.attempts(ctx.store, "a")[1].resumed_from == paused.step


async def test_run_completed_before_its_pause_stays_completed(home: Path) -> None:
    behave(home, driver={"deaf": True, "seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        want(ctx, "a", "pause")
        assert (await until_state(ctx, "a", "ended")).reason == "completed"


async def test_kill_ends_a_run_that_does_not_listen(home: Path) -> None:
    behave(home, driver={"deaf": True, "seconds": 30})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        want(ctx, "a", "kill")
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, runs.attempts(ctx.store, "a")[0].signal) == ("killed", signal.SIGKILL)


async def test_driver_killed_by_others_is_lost(home: Path) -> None:
    behave(home, driver={"stuck_at": 2, "prints": 9})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        await until(lambda: log_end(runs.get(ctx.store, "a").attempt_dir.log).endswith("x" * 9))
        os.kill(pid_of(ctx, "a"), signal.SIGKILL)
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.detail) == ("lost", "the driver was killed by SIGKILL")


async def test_failing_run_restarts_until_it_stops_advancing(home: Path) -> None:
    behave(home, driver={"crash_at": 3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources={"restart": "on-failure"})
        row = await until(lambda: (r := runs.get(ctx.store, "a")).state == "ended" and r)
        assert (row.reason, row.attempt) == ("lost", 4)
        assert "3 attempts got no further" in row.detail


async def test_pool_that_lost_a_run_is_replaced(home: Path) -> None:
    behave(home, driver={"lost_at": 3})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        assert (await until_state(ctx, "a", "ended")).reason == "lost"
        behave(home)
        runs.move(ctx.store, "a", Move.RESUME)
        ctx.loop.poke()
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        assert ctx.pools["tiny-1"].number == 2


async def test_driver_missing_its_pools_end_is_killed(home: Path) -> None:
    behave(home, driver={"hang": True, "seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer={"steps": 1000})
        await until_state(ctx, "a", "running")
        ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, "pool tiny-1 was killed by SIGKILL" in row.detail) == ("lost", True)


async def test_new_daemon_adopts_driver_and_pool(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        before = pid_of(ctx, "a"), ctx.pools["tiny-1"].process.pid
    async with reconciling(home) as ctx:
        assert (pid_of(ctx, "a"), ctx.pools["tiny-1"].process.pid) == before
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.attempt, runs.attempts(ctx.store, "a")[0].exit_code) == ("completed", 1, 0)


async def test_next_daemon_learns_of_ended_run(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})  # it is seen running
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        attempt = runs.get(ctx.store, "a").attempt_dir
    await until(lambda: (read_status(attempt) or {})["exit_code"] == 0)
    async with reconciling(home) as ctx:
        assert (await until_state(ctx, "a", "ended")).reason == "completed"


async def test_run_placed_before_a_crash_starts_once(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a")
    place_runs(ctx)
    assert runs.get(ctx.store, "a").state == "starting"
    ctx.store.close()
    ctx.journal.close()
    async with reconciling(home) as ctx:
        row = await until_state(ctx, "a", "ended")
        assert (row.reason, row.attempt) == ("completed", 1)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_only_the_newest_checkpoints_versions_and_samples_stay(home: Path) -> None:
    async with reconciling(home) as ctx:
        keep = {"keep": 2, "keep_versions": 1, "keep_samples": 3}
        submit(ctx, "a", trainer={"steps": 10}, checkpoint={"every": 2} | keep)
        await until_state(ctx, "a", "ended")
        directory = ctx.home.run("a")
        await until(lambda: names(directory.checkpoints) == ["000008-a1", "000010-a1"])
        await until(lambda: names(directory.versions) == ["001008", "001010"])
        await until(lambda: names(directory.samples) == ["000008.jsonl", "000009.jsonl", "000010.jsonl"])
        assert [c.step for c in checkpoints(ctx.store, "a")] == [8, 10]


async def test_daemon_keeps_home_within_disk_budget(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LOOK_SECONDS", 0.1)
    async with reconciling(home, disk_budget=1) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
        await until(lambda: names(ctx.home.run("a").samples) == ["000006.jsonl"])
        await until(lambda: "disk" in {event.kind for event in events.after(ctx.store, 0, "a")})


async def test_only_pokes_and_time_make_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    now = 1000.0  # a sum with it is exact
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert [loop.looks_at_all(), loop.looks_at_all()] == [True, False]
    loop.poke()
    await loop.wait([])
    assert [loop.looks_at_all(), loop.looks_at_all()] == [True, False]
    now += REST
    assert loop.looks_at_all()


def test_slow_verb_leaves_items_for_later_passes(home: Path) -> None:
    ctx, done = open_context(home), list[str]()

    def slow(ctx: Context, item: str) -> None:
        done.append(item)
        time.sleep(0.03)
        if item == "bad":
            raise LoradError("it fails each time")

    passes = list[list[str]]()
    for _ in range(3):
        each(ctx, slow, ["bad", "a", "b"], Item, seconds=0.02)
        passes, done = [*passes, done], []
    assert passes == [["bad"], ["a"], ["a"]], "an item that fails lets the others go first"
    assert ("slow", "bad") in ctx.loop.troubles


async def test_moves_are_in_the_daemons_journal(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
    changes = [change.rows.get("runs", []) for _, change in read(home / "journal.jsonl").changes]
    states = [row["state"] for rows in changes for row in rows if "state" in row]
    assert list(dict.fromkeys(states)) == ["queued", "starting", "running", "ended"]


@pytest.mark.parametrize("wanted", ["pause", "stop"])
async def test_a_stop_before_the_first_record_loses_nothing(home: Path, wanted: str) -> None:
    behave(home, driver={"seconds": 1.0})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "starting")
        want(ctx, "a", wanted)
        row = await until(lambda: (r := runs.get(ctx.store, "a")).state in ("paused", "ended") and r)
        assert (row.state, row.reason) == {"pause": ("paused", None), "stop": ("ended", "stopped")}[wanted]


async def test_queued_run_without_files_blocks_nobody(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        for name in ("first", "broken", "last"):
            submit(ctx, name)
        (ctx.home.run("broken").root / "request.json").unlink()
        await until_state(ctx, "last", "ended")
        assert "cannot be read" in runs.get(ctx.store, "broken").waiting


async def test_rewound_samples_are_pruned_before_current_ones(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", checkpoint={"keep_samples": 2})
        await until_state(ctx, "a", "ended")
        old = ctx.home.run("a").samples
        for name in ("000007-a1", "000008-a1", "000002-a2", "000003-a2"):
            (old / f"{name}.jsonl").write_text("")
        prune(ctx, runs.get(ctx.store, "a"))
        assert names(old) == ["000002-a2.jsonl", "000003-a2.jsonl"]
