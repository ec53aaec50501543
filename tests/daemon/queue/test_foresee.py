"""What runs that wait are told about their start, against what then happens."""

import time
from pathlib import Path

import pytest

from lorad.client.words import when_in_words
from lorad.daemon.context import Context
from lorad.daemon.queue import tenants
from lorad.daemon.queue.forecast import forecasts_lately, keep_forecasts
from lorad.daemon.queue.place import place_runs
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.foreseen.forecasts import accuracy, give, open_forecasts, started
from tests.daemon.queue.test_simulate import busy, long
from tests.kit.daemon_world import behave, open_context, reconciling, submit, until, until_state


def rows(ctx: Context) -> list[tuple[str, float, str, float | None, int]]:
    return ctx.store.tuples("SELECT run, starts_at, after, started_at, void FROM forecasts ORDER BY id")


def test_first_forecast_is_kept_until_the_start(home: Path) -> None:
    ctx = busy(home)
    submit(ctx, "b", model="/models/b")
    keep_forecasts(ctx)
    ((run, starts_at, after, began, _),) = rows(ctx)
    assert (run, after, began) == ("b", "a", None) and ctx.queue.foreseen[1] == {"b": (starts_at, "a")}
    ctx.queue.foreseen = float("-inf"), {}
    keep_forecasts(ctx)
    runs.move(ctx.store, "a", Move.END, reason=EndReason.STOPPED)
    place_runs(ctx)
    keep_forecasts(ctx)
    ((run, again, _, began, void),) = rows(ctx)
    assert (run, again, void) == ("b", starts_at, 0) and began is not None and not open_forecasts(ctx.store)


def test_run_that_leaves_the_queue_is_not_compared(home: Path) -> None:
    ctx = busy(home)
    submit(ctx, "b", model="/models/b")
    keep_forecasts(ctx)
    runs.move(ctx.store, "b", Move.END, reason=EndReason.STOPPED)
    keep_forecasts(ctx)
    assert [row[4] for row in rows(ctx)] == [1] and forecasts_lately(ctx).count == 0


def test_forecasts_are_compared_with_what_happened(home: Path) -> None:
    ctx = open_context(home)
    for run, said, began in (("a", 150.0, 200.0), ("b", 200.0, 200.0), ("c", 90.0, 100.0)):
        give(ctx.store, run, at=1000.0, starts_at=1000.0 + said, after="")
        started(ctx.store, run, 1000.0 + began)
    found = accuracy(ctx.store, 0.0)
    assert found.count == 3 and found.off == pytest.approx(0.1)
    assert accuracy(ctx.store, 1150.0).count == 2 and accuracy(ctx.store, 5000.0).off is None


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (-5, "within a minute, after a"),
        (2400, "in about 40 min, after a"),
        (7 * 3600, "in about 7 h, after a"),
        (3 * 86400, "in about 3 days, after a"),
    ],
)
def test_start_is_told_roughly(seconds: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert when_in_words(1e9 + seconds, "a") == says
    assert when_in_words(None, "a") == ""


async def test_real_run_starts_after_the_steps_foretold(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may slow steps down; it changes neither how many there are nor who is waited for."""
    monkeypatch.setattr(tenants, "MAX_VERSIONS", 5)  # a pool has room for one
    behave(home, driver={"seconds": 0.2})
    async with reconciling(home) as ctx:
        submit(ctx, "a", **long(20))
        await until(lambda: runs.get(ctx.store, "a").step >= 5)
        submit(ctx, "b", **long(20))
        ((_, starts_at, after, _, _),) = await until(lambda: rows(ctx))
        row = await until_state(ctx, "b", "running")
        ((_, _, _, began, _),) = rows(ctx)
        times = [at for (at,) in ctx.store.tuples("SELECT at FROM steps WHERE run = 'a' ORDER BY step")]
        assert after == "a" and row.pool == runs.get(ctx.store, "a").pool
        assert len(times) == 20 and began is not None and began >= times[-1]
        ends = {made: end_of(times[:made], 20) for made in range(5, 20)}  # by the steps that were known
        assert any(starts_at == pytest.approx(end, abs=1e-3) for end in ends.values())
        assert forecasts_lately(ctx).count == 1


def end_of(times: list[float], steps: int) -> float:
    """When a run ends that keeps its pace."""
    return times[-1] + (steps - len(times)) * (times[-1] - times[0]) / (len(times) - 1)
