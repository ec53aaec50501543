"""When queued runs start: by the steps that others have left, at the pace that was measured."""

import time
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import DeviceHours, Limit, Queue
from lorad.daemon.context import Context
from lorad.daemon.process.processes import ProcessState
from lorad.daemon.queue import simulate as module
from lorad.daemon.queue import tenants
from lorad.daemon.queue.choose import choose
from lorad.daemon.queue.limits import quota_of
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.simulate import Foreseen, simulate
from lorad.daemon.queue.snapshot import Snapshot, take_snapshot
from lorad.protocol.status import Capacity, PoolInfo, PoolStatus, TenantStatus
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.rows import RunRow
from tests.daemon.queue.test_limits import owned
from tests.daemon.queue.test_shares import ANN, used
from tests.kit.daemon_world import open_context, submit

AT = 2_000_000_000.0  # the moment of every look ahead


def long(steps: int, **sections: Any) -> dict[str, Any]:
    return {"trainer": {"steps": steps}, **sections}


def works(ctx: Context, name: str, made: int, seconds: float) -> None:
    """A run has made steps, of so many seconds each, the last one just now."""
    run = runs.get(ctx.store, name)
    sql = "INSERT INTO steps (run, attempt, step, seq, at, version, samples, samples_sha256, metrics) "
    with ctx.store.write() as connection:
        for step in range(1, made + 1):
            at = AT - (made - step) * seconds
            connection.execute(
                f"{sql} VALUES (?, ?, ?, ?, ?, 0, '', '', '{{}}')", (name, run.attempt, step, step, at)
            )
        connection.execute("UPDATE runs SET step = ? WHERE name = ?", (made, name))
        begun = AT - made * seconds
        connection.execute("UPDATE attempts SET started_at = ? WHERE run = ?", (begun, name))
        runs.move(ctx.store, name, Move.CONFIRM)


def foreseen(ctx: Context) -> dict[str, Foreseen]:
    return simulate(ctx, take_snapshot(ctx, runs.queue(ctx.store)), AT)


def busy(home: Path, **config: Any) -> Context:
    """Run a has the only pool, with 40 steps of 10 seconds left."""
    ctx = open_context(home, **config)
    submit(ctx, "a", model="/models/a", **long(60))
    place_runs(ctx)
    works(ctx, "a", 20, 10.0)
    return ctx


def test_run_starts_after_the_steps_that_are_left(home: Path) -> None:
    ctx = busy(home)
    submit(ctx, "b", model="/models/b")
    assert foreseen(ctx) == {"b": Foreseen(AT + 400, "a")}


def test_queue_moves_at_pace_of_runs_alike(home: Path) -> None:
    ctx = busy(home)
    submit(ctx, "b", model="/models/b")
    submit(ctx, "d", model="/models/c")
    assert foreseen(ctx) == {"b": Foreseen(AT + 400, "a")}  # nobody has measured a run on b's base
    runs.move(ctx.store, "b", Move.END, reason=EndReason.STOPPED)
    submit(ctx, "e", model="/models/a", **long(30, resources={"exclusive": True}))
    runs.set_fields(ctx.store, "d", priority=-1)
    assert foreseen(ctx)["e"] == Foreseen(AT + 400, "a") and foreseen(ctx)["d"] == Foreseen(AT + 700, "e")


def test_unmeasured_run_makes_the_start_unknown(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a", model="/models/a", **long(60))
    place_runs(ctx)
    submit(ctx, "b", model="/models/b")
    assert foreseen(ctx) == {}


def test_room_of_a_pool_frees_one_by_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_VERSIONS", 5)  # room for one
    ctx = open_context(home)
    submit(ctx, "a", **long(60))
    place_runs(ctx)
    works(ctx, "a", 20, 10.0)
    for name in ("b", "c"):
        submit(ctx, name, **long(30))
    assert foreseen(ctx) == {"b": Foreseen(AT + 400, "a"), "c": Foreseen(AT + 700, "b")}


def test_what_a_pool_reports_goes_with_its_runs(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a", **long(60))
    place_runs(ctx)
    works(ctx, "a", 20, 10.0)
    info = PoolInfo("p", 1, "m", "/m", "", "builtin", "builtin", "fused", "cpu", "float32", 1, 64, {})
    taken = Capacity(max_versions=5, versions=3, max_rank=64, memory=100_000, memory_used=90_000)
    tenants = [TenantStatus("a", 1, "idle", 90_000)]
    loaded = ["a@1", "a@2", "a@3"]
    submit(ctx, "b", **long(30))
    now = take_snapshot(ctx, runs.queue(ctx.store))
    pool = ctx.pools["tiny-1"]
    pool.process = ProcessState("alive", 1)
    pool.status = PoolStatus(info, tenants, loaded, 0.0, 0.0, 1, 0.0, capacity=taken)
    now = now.with_runs(now.active, now.pools)
    assert simulate(ctx, now, AT) == {"b": Foreseen(AT + 400, "a")}


def test_limit_of_its_user_counts(home: Path) -> None:
    ctx = busy(home, queue=Queue(limits=Limit(runs=1)))
    submit(ctx, "b", model="/models/a")
    assert foreseen(ctx) == {"b": Foreseen(AT + 400, "a")}


def test_quota_says_when_it_is_enough_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = open_context(home, queue=Queue(limits=Limit(device_hours=DeviceHours(5.0, "1d"))))
    owned(ctx, "ann", ANN, "a")
    monkeypatch.setattr(time, "time", lambda: AT)
    used(ctx, "a", 6.0, ago=3)
    quota = quota_of(ctx, "ann", ANN, AT)
    assert quota is not None and quota.again is not None
    assert foreseen(ctx) == {"a": Foreseen(quota.again, "")}


def test_urgent_run_starts_at_the_next_step(home: Path) -> None:
    ctx = busy(home)
    submit(ctx, "b", model="/models/a", **long(60, resources={"exclusive": True, "priority": 1}))
    submit(ctx, "c", model="/models/c")
    found = foreseen(ctx)
    assert found["b"] == Foreseen(AT + 10, "a")
    # a comes back after b with the 39 steps that it has left then, and c, which is younger, after it
    assert (found["a"], found["c"]) == (Foreseen(AT + 610, "b"), Foreseen(AT + 1000, "a"))


def test_planned_restart_is_waited_for(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a")
    runs.set_fields(ctx.store, "a", restart_at=AT + 30)
    assert foreseen(ctx) == {"a": Foreseen(AT + 30, "")}


def test_look_ahead_changes_nothing_and_repeats(home: Path) -> None:
    ctx = busy(home)
    for name in ("b", "c", "d"):
        submit(ctx, name, model="/models/a", **long(20, resources={"exclusive": True}))
    before = [*runs.every(ctx.store)], dict(ctx.pools), ctx.store.changes
    first = foreseen(ctx)
    assert first == foreseen(ctx) and len(first) == 3
    assert before == ([*runs.every(ctx.store)], dict(ctx.pools), ctx.store.changes)


def test_look_ahead_has_a_bound(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[RunRow] = []

    def counted(ctx: Context, now: Snapshot, run: RunRow, claims: Any, at: float) -> Any:
        looks.append(run)
        return choose(ctx, now, run, claims, at)

    monkeypatch.setattr("lorad.daemon.queue.simulate.choose", counted)
    monkeypatch.setattr(module, "MOST_LOOKS", 60)
    ctx = busy(home)
    for number in range(40):
        submit(ctx, f"q{number}", model="/models/a", **long(20, resources={"exclusive": True}))
    found = foreseen(ctx)
    assert found["q0"] == Foreseen(AT + 400, "a") and "q9" not in found and 60 <= len(looks) <= 66
