"""Say when runs will start that wait, or that do not exist yet.

What was said first of a run that waits is kept, to compare it with what happens.
"""

import time
from contextlib import suppress
from itertools import takewhile

import msgspec
from msgspec.structs import replace

from lorad.daemon.access import name_for, owner_of
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import NodesShape
from lorad.daemon.queue.choose import Blocked, Hindrance, WaitingRun, choose
from lorad.daemon.queue.place import FAR_BACK
from lorad.daemon.queue.simulate import simulate
from lorad.daemon.queue.snapshot import LOOKED_AT, take_snapshot
from lorad.errors import LoradError
from lorad.records.checks import Start
from lorad.records.daemon import Forecasts
from lorad.store import runs
from lorad.store.foreseen import forecasts
from lorad.store.rows import RunRow

_EVERY = 10.0  # seconds; runs that were queued meanwhile hear at once
_DAYS = 7


def keep_forecasts(ctx: Context) -> None:
    """Look ahead now and then, and when a run was queued; keep the first forecast of each run."""
    seen_at, _ = ctx.queue.foreseen
    queue = runs.queue(ctx.store)
    queued = {run.name for run in queue}
    foretold = forecasts.open_forecasts(ctx.store)
    if foretold - queued:
        forecasts.void(ctx.store, foretold - queued)
    if not queued:
        ctx.queue.foreseen = float("-inf"), {}
        return
    if time.monotonic() - seen_at <= _EVERY and ctx.queue.looked_for == queued:
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


def forecast(ctx: Context, run: RunRow) -> Start:
    """Say whether a run that does not exist yet would start at once, or what it would wait for. It is placed
    in thought as a pass of placing would do it, behind the queued runs that would go before it and what these
    keep for themselves. A run that waits for its own files claims nothing. Nothing is changed.

    run: a row that the database does not have; its directory has a `request.json`.

    Raises SpecError, StorageError.
    """
    now = take_snapshot(ctx, runs.queue(ctx.store), run)
    at = time.time()
    names = [other.name for other in now.queued] + [other.name for other in now.far_back]
    ahead = names.index(run.name)
    claims: list[WaitingRun] = []
    for other in takewhile(lambda queued: queued.name != run.name, now.queued):
        if (other.restart_at or 0.0) > at:
            continue
        with suppress(OSError, msgspec.MsgspecError, LoradError):
            others_choice = choose(ctx, now, other, claims)
            claims += others_choice.claims if isinstance(others_choice, Blocked) else ()
    choice = choose(ctx, now, run, claims)
    if isinstance(choice, Blocked) and Hindrance.NEVER in choice.by:
        return Start("never", choice.why)
    if ahead >= LOOKED_AT and not (isinstance(choice, Blocked) and Hindrance.LIMIT in choice.by):
        return Start("waits", FAR_BACK, ahead=ahead)
    if isinstance(choice, Blocked):
        stops = [owner_of(ctx, run).name(victim) for victim in choice.victims]
        start = Start("waits", choice.why, stops=stops, ahead=ahead)
        if foreseen := simulate(ctx, now, at).get(run.name):
            start = replace(start, starts_at=foreseen.at, after=name_for(ctx, run, foreseen.after))
        return start
    key = choice.setup.key
    warm = next((pool.id for pool in now.pools if now.is_used(pool) and pool.setup.key == key), "")
    is_granted = warm or not isinstance(choice.devices[0], NodesShape)
    why = "" if is_granted else "the cluster grants them"
    return Start("now", why, devices=[device.name for device in choice.devices], pool=warm, ahead=ahead)
