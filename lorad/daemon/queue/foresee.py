"""Say when runs that wait will start, and keep what was said first, to compare it with what happens."""

import time

from lorad.daemon.access import name_for
from lorad.daemon.context import Context
from lorad.daemon.queue.simulate import simulate
from lorad.daemon.queue.snapshot import take_snapshot
from lorad.records.daemon import Forecasts
from lorad.store import runs
from lorad.store.foreseen import forecasts

_EVERY = 10.0  # seconds; runs that were queued meanwhile hear at once
_DAYS = 7


def keep_forecasts(ctx: Context) -> None:
    """Look ahead now and then, and when a run was queued; keep the first that is known of each run."""
    seen_at, _ = ctx.queue.foreseen
    queue = runs.queue(ctx.store)
    queued = {run.name for run in queue}
    foretold = forecasts.open_forecasts(ctx.store)
    if foretold - queued:
        forecasts.void(ctx.store, foretold - queued)
    if not queued:
        ctx.queue.foreseen = float("-inf"), {}
        return
    is_due = time.monotonic() - seen_at > _EVERY
    if not is_due and ctx.queue.looked_for == queued:
        return
    at = time.time()
    starts = simulate(ctx, take_snapshot(ctx, queue), at)
    after = {run.name: name_for(ctx, run, starts[run.name].after) for run in queue if run.name in starts}
    ctx.queue.foreseen = time.monotonic(), {name: (starts[name].at, words) for name, words in after.items()}
    ctx.queue.looked_for = queued
    if fresh := sorted(queued & starts.keys() - foretold):
        with ctx.store.write():
            for name in fresh:
                forecasts.give(ctx.store, name, at=at, starts_at=starts[name].at, after=starts[name].after)


def forecasts_lately(ctx: Context) -> Forecasts:
    """Compare the forecasts of the last days with what happened."""
    accuracy = forecasts.accuracy(ctx.store, time.time() - _DAYS * 24 * 3600)
    return Forecasts(_DAYS, accuracy.count, accuracy.off)
