"""The loop that makes the machine agree with the store: it can stop at any point and be begun again by a new daemon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from lorad.daemon.budget import keep_budget
from lorad.daemon.context import Context, attempt_dir, run_dir
from lorad.daemon.distrust import take_in_or_end
from lorad.daemon.facts import last_facts
from lorad.daemon.gateway import keep_gateway as keep_gateway_up
from lorad.daemon.health import heal as heal_hung
from lorad.daemon.holders import keep_leases
from lorad.daemon.holds import hold as hold_versions
from lorad.daemon.launch import launch
from lorad.daemon.place import place_runs
from lorad.daemon.pools import put_away_pools, watch_pools
from lorad.daemon.prune import prune as prune_run
from lorad.daemon.prune import prune_again
from lorad.daemon.rotate import rotate as rotate_logs
from lorad.daemon.serving import keep_serving as keep_pools_serving
from lorad.daemon.settle import settle
from lorad.daemon.stop import stop as stop_run
from lorad.daemon.sweeps import halve as halve_sweeps
from lorad.daemon.table import keep_table
from lorad.errors import LoradError
from lorad.protocol.journal import Record
from lorad.states import Move, RunState
from lorad.store import events, runs
from lorad.store.db import Row

log = logging.getLogger("lorad.daemon")

ACTIVE = (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


async def reconcile(ctx: Context) -> None:
    """Until the daemon closes. However much there is to do, as much time is left for requests."""
    told, clock = events.last_id(ctx.store), asyncio.get_running_loop().time
    while not ctx.closing:
        began = clock()
        guarded(pass_once, ctx)
        told = tell(ctx, told)
        await asyncio.sleep(clock() - began)
        await ctx.waker.wait(journals(ctx))


def pass_once(ctx: Context) -> None:
    watch(ctx)
    ingest(ctx)
    confirm(ctx)
    reap(ctx)
    heal(ctx)
    halve(ctx)
    keep_serving(ctx)
    place(ctx)
    start(ctx)
    stop(ctx)
    put_away(ctx)
    prune(ctx)
    tell_leases(ctx)
    hold(ctx)
    tell_gateway(ctx)
    keep_gateway(ctx)
    tidy(ctx)
    rotate(ctx)


def watch(ctx: Context) -> None:
    ctx.processes.collect()
    watch_pools(ctx)


def ingest(ctx: Context) -> None:
    guarded(ingest_all, ctx)


def confirm(ctx: Context) -> None:
    each(ctx, confirm_run, *ACTIVE)


def reap(ctx: Context) -> None:
    each(ctx, reap_run, *ACTIVE)


def heal(ctx: Context) -> None:
    guarded(heal_hung, ctx)


def halve(ctx: Context) -> None:
    guarded(halve_sweeps, ctx)


def keep_serving(ctx: Context) -> None:
    guarded(keep_pools_serving, ctx)


def place(ctx: Context) -> None:
    guarded(place_runs, ctx)


def start(ctx: Context) -> None:
    each(ctx, launch, RunState.STARTING)


def stop(ctx: Context) -> None:
    each(ctx, stop_run, *ACTIVE)


def put_away(ctx: Context) -> None:
    serving = {pool.id for pool in ctx.pools.values() if pool.serves}
    put_away_pools(ctx, serving | {run["pool"] for run in runs.in_states(ctx.store, *ACTIVE)})


def prune(ctx: Context) -> None:
    guarded(prune_again, ctx)


def tell_leases(ctx: Context) -> None:
    guarded(keep_leases, ctx)


def hold(ctx: Context) -> None:
    guarded(hold_versions, ctx)


def tell_gateway(ctx: Context) -> None:
    guarded(keep_table, ctx)


def keep_gateway(ctx: Context) -> None:
    guarded(keep_gateway_up, ctx)


def tidy(ctx: Context) -> None:
    ctx.readers.tidy()
    guarded(keep_budget, ctx)


def rotate(ctx: Context) -> None:
    guarded(rotate_logs, ctx)


def ingest_all(ctx: Context) -> None:
    """Take in what the drivers wrote, on disk at once; then make room where there is one checkpoint more."""
    fresh: dict[str, list[Record]] = {}

    def ingest_run(ctx: Context, run: Row) -> None:
        fresh[run["name"]] = take_in_or_end(ctx, run)

    with ctx.store.write():
        each(ctx, ingest_run, *ACTIVE)
    for name, records in fresh.items():
        if any(record.kind == "checkpoint" for record in records):
            guarded(prune_run, ctx, runs.get(ctx.store, name))


def confirm_run(ctx: Context, run: Row) -> None:
    """The attempt has begun when its driver says so. After its rewind, `resume_step` has had its effect."""
    if run["state"] != RunState.STARTING and run["resume_step"] is None:
        return
    kinds = {fact.kind for fact in last_facts(run_dir(run).journal, run["attempt"])}
    if kinds - {"attempt", "warning", "end"} and run["resume_step"] is not None:
        runs.set_fields(ctx.store, run["name"], resume_step=None)
    if kinds - {"end"} and run["state"] == RunState.STARTING:
        ctx.move(run["name"], Move.CONFIRM)


def reap_run(ctx: Context, run: Row) -> None:
    driver = ctx.processes.inspect(attempt_dir(run))
    if driver.phase in ("exited", "vanished"):
        settle(ctx, run, driver)


def each(ctx: Context, verb: Callable[[Context, Row], None], *states: RunState) -> None:
    """A verb for every run in these states; a run that cannot be dealt with now does not hold up the others."""
    for run in runs.in_states(ctx.store, *states):
        guarded(verb, ctx, run)


def guarded(verb: Callable[..., None], ctx: Context, *run: Row) -> None:
    """Whatever goes wrong, the loop goes on and tries again; the log says so once."""
    where = " ".join([verb.__name__, *(row["name"] for row in run)])
    try:
        verb(ctx, *run)
        ctx.troubles.pop(where, None)
    except Exception as error:
        if ctx.troubles.get(where) != repr(error):
            log.error("%s: %s", where, error, exc_info=not isinstance(error, LoradError))
        ctx.troubles[where] = repr(error)


def tell(ctx: Context, told: int) -> int:
    """Wake the readers of events when there are new ones; the newest id."""
    newest = events.last_id(ctx.store)
    if newest != told:
        ctx.waker.ring()
    return newest


def journals(ctx: Context) -> list[Path]:
    return [run_dir(run).journal for run in runs.in_states(ctx.store, *ACTIVE)]
