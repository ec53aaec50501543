"""Who used the least lately comes first; a run says where it stands and why; a new daemon finds the same."""

import time
from pathlib import Path

import pytest

from lorad.box.config import Queue, Sharing
from lorad.daemon.bill.take_in import keep_bill
from lorad.daemon.context import Context
from lorad.daemon.process.processes import ProcessState
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.snapshot import take_snapshot
from lorad.protocol.status import Use, Uses, encode_uses
from lorad.store import runs
from lorad.store.bill import HOUR, Person, take_in
from tests.daemon.queue.test_limits import owned
from tests.kit.daemon_world import open_context, submit

ANN, BOB = 4001, 4002


def used(ctx: Context, run: str, hours: float, ago: float = 0.0) -> None:
    """Bill device-hours to a run, so many hours ago."""
    hour = int(time.time() - ago * HOUR) // HOUR * HOUR
    report = Uses(
        f"life-{run}-{ago}", "tiny-1", "cpu", 1, 0.0, 0.0, [Use(1, hour, run, 1, held=hours * HOUR)]
    )
    take_in(ctx.store, report, Person("root", 0))
    ctx.bill.taken += 1


def two_users(home: Path, **queue: object) -> Context:
    """One run has the pool; then ann's runs wait, and later bob's, who has used nothing."""
    ctx = open_context(home, queue=Queue(**queue))  # type: ignore[arg-type]
    submit(ctx, "first", model="/models/other")
    place_runs(ctx)
    owned(ctx, "ann", ANN, "a1", "a2")
    owned(ctx, "bob", BOB, "b1", "b2")
    return ctx


def order(ctx: Context) -> list[str]:
    return [run.name for run in take_snapshot(ctx, runs.queue(ctx.store)).queued]


def test_who_used_least_lately_comes_first(home: Path) -> None:
    ctx = two_users(home)
    assert order(ctx) == ["a1", "a2", "b1", "b2"]
    used(ctx, "a1", 2.0)
    assert order(ctx) == ["b1", "b2", "a1", "a2"]
    used(ctx, "b1", 3.0)
    assert order(ctx) == ["a1", "a2", "b1", "b2"]


def test_past_use_counts_the_less_the_older(home: Path) -> None:
    ctx = two_users(home, half_life=4 * HOUR)
    used(ctx, "a1", 6.0, ago=12)  # counts 0.75
    used(ctx, "b1", 1.0)
    assert order(ctx) == ["a1", "a2", "b1", "b2"]
    ctx = two_users_again(ctx, half_life=400 * HOUR)
    assert order(ctx) == ["b1", "b2", "a1", "a2"]


def two_users_again(ctx: Context, **queue: object) -> Context:
    """The same home with another daemon, which has only what is on disk."""
    ctx.store.close()
    ctx.journal.close()
    return open_context(ctx.home.root, queue=Queue(**queue))  # type: ignore[arg-type]


def test_next_daemon_finds_the_same_order(home: Path) -> None:
    ctx = two_users(home)
    used(ctx, "a1", 2.0)
    before = order(ctx)
    assert order(two_users_again(ctx)) == before == ["b1", "b2", "a1", "a2"]


def test_priority_outranks_what_was_used(home: Path) -> None:
    ctx = two_users(home)
    used(ctx, "a1", 2.0)
    runs.set_fields(ctx.store, "a2", priority=1)
    assert order(ctx) == ["a2", "b1", "b2", "a1"]


@pytest.mark.parametrize("half_life", [None, 0.0])
def test_without_half_life_users_take_turns(home: Path, half_life: float | None) -> None:
    ctx = two_users(home, half_life=half_life)
    used(ctx, "a1", 2.0)
    assert order(ctx) == ["a1", "a2", "b1", "b2"]


def test_queued_run_says_its_place_and_why(home: Path) -> None:
    ctx = two_users(home, half_life=1e9)
    used(ctx, "a1", 6.0)
    used(ctx, "b1", 0.5)
    place_runs(ctx)
    places = ctx.queue.places
    assert [(name, places[name].place, places[name].of) for name in ("b1", "a2")] == [
        ("b1", 1, 4),
        ("a2", 4, 4),
    ]
    assert (places["b1"].behind, places["b2"].behind) == ("", "")
    assert places["a1"].behind == "bob used 0.50 device-hours lately, ann 6.0"


def test_reason_names_nobody_whom_only_owners_see(home: Path) -> None:
    ctx = two_users(home)
    used(ctx, "a1", 6.0)
    ctx.config = type(ctx.config)(sharing=Sharing(read="owner"))
    place_runs(ctx)
    assert ctx.queue.places["a1"].place == 3 and ctx.queue.places["a1"].behind == ""


def test_runs_at_work_count_as_they_go(home: Path) -> None:
    ctx = two_users(home)
    pool = ctx.pools["other-1"]
    file = pool.attempt(1).work / "usage.jsonl"
    file.parent.mkdir(parents=True)
    now = int(time.time()) // HOUR * HOUR
    for held, then in ((30.0, "a1"), (3000.0, "b1")):
        with file.open("ab") as usage:
            report = Uses("life", "other-1", "cpu", 1, 0.0, 0.0, [Use(1, now, "a1", 1, held=held)])
            usage.write(encode_uses(report))
        pool.process, ctx.bill.read_at = ProcessState("alive", 1), float("-inf")
        keep_bill(ctx)
        pool.process = ProcessState("absent")
        assert order(ctx)[0] == then
