"""The loop that makes the machine agree with the store. A new daemon can go on wherever it stopped."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from lorad.daemon.bill.take_in import keep_bill
from lorad.daemon.context import Context
from lorad.daemon.guarded import each, guarded, of_run
from lorad.daemon.health import heal
from lorad.daemon.pools.grants import watch_grants
from lorad.daemon.pools.life import find_lost_pools, put_away_pools, watch_pools
from lorad.daemon.pools.watch_gpus import keep_history
from lorad.daemon.process.processes import DAMAGED
from lorad.daemon.queue.cluster import keep_cluster
from lorad.daemon.queue.device_holders import keep_leases
from lorad.daemon.queue.forecast import keep_forecasts
from lorad.daemon.queue.neighbours import watch_neighbours
from lorad.daemon.queue.place import place_requests, place_runs
from lorad.daemon.queue.set_aside import give_way, keep_set_aside
from lorad.daemon.runs.launch import launch
from lorad.daemon.runs.settle import settle
from lorad.daemon.runs.stop import stop as stop_run
from lorad.daemon.runs.sweeps import halve
from lorad.daemon.runs.take_in import last_facts, take_in_or_end, watch_journals
from lorad.daemon.services.table import keep_services
from lorad.daemon.serving.keep_loaded import keep_loaded
from lorad.daemon.serving.keep_up import keep_serving
from lorad.daemon.serving.table import keep_table
from lorad.daemon.storage.budget import keep_budget
from lorad.daemon.storage.prune import prune, prune_again
from lorad.daemon.trim_logs import rotate
from lorad.daemon.troubles import Item
from lorad.errors import LoradError, StorageError
from lorad.states import ACTIVE, Move, RunState
from lorad.store import events, runs
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

_LAUNCH_SECONDS = 0.02  # in one pass


async def reconcile(ctx: Context) -> None:
    """Make passes until the daemon closes, or its home is moved and it would judge runs by missing files.

    Each verb is guarded alone, and so is each item that it works on: what fails is tried again in the next
    pass. The daemon answers requests between two verbs, and after a pass for as long as the pass took. Once a
    request has closed it, the verbs that are left start nothing more.
    """
    clock = asyncio.get_running_loop().time
    while not ctx.loop.closing:
        if ctx.store.is_moved:
            message = "%s was moved or removed; the daemon ends, start it where its home is now"
            log.error(message, ctx.home.root)
            ctx.close()
            break
        began = clock()
        verbs = PASS if ctx.loop.looks_at_all() else ON_GROWTH
        for verb in takewhile(lambda _: not ctx.loop.closing, verbs):
            guarded(ctx, Item(), verb)
            await asyncio.sleep(0)
        await asyncio.sleep(clock() - began)
        journals: list[Path] = []
        with contextlib.suppress(LoradError):  # none while the database cannot be read
            journals = [run.dir.journal for run in _active_runs(ctx)]
        await ctx.loop.wait(journals)


def _tidy(ctx: Context) -> None:
    """Let shims that are over leave the process table, and empty the WAL where it is large."""
    ctx.processes.collect()
    ctx.readers.tidy()


def _ingest(ctx: Context) -> None:
    """Take in what the drivers wrote, and prune where there is one checkpoint more."""
    written = set[str]()

    def ingest_run(ctx: Context, run: RunRow) -> None:
        if any(record.kind == "checkpoint" for record in take_in_or_end(ctx, run)):
            written.add(run.name)

    with ctx.store.write(durable=False):  # the journals are on disk
        each(ctx, ingest_run, _active_runs(ctx), of_run)
    each(ctx, prune, [run for run in _active_runs(ctx) if run.name in written], of_run)


def _confirm(ctx: Context) -> None:
    """Record which attempts have begun, on disk at once."""
    if active := _active_runs(ctx):
        with ctx.store.write():
            each(ctx, _confirm_run, active, of_run)


def _confirm_run(ctx: Context, run: RunRow) -> None:
    """Record that an attempt has begun once its driver says so; then its `resume_step` is used up."""
    if run.state != RunState.STARTING and run.resume_step is None:
        return
    kinds = {fact.kind for fact in last_facts(run.dir.journal, run.attempt)}
    if kinds - {"attempt", "warning", "end"} and run.resume_step is not None:
        runs.set_fields(ctx.store, run.name, resume_step=None)
    if kinds - {"end"} and run.state == RunState.STARTING:
        runs.move(ctx.store, run.name, Move.CONFIRM)


def _reap(ctx: Context) -> None:
    each(ctx, _reap_run, _active_runs(ctx), of_run)


def _reap_run(ctx: Context, run: RunRow) -> None:
    """Raises StorageError while the driver's status cannot be read and its lock alone shows its life."""
    driver = ctx.processes.inspect(run.attempt_dir)
    if driver.phase in ("exited", "vanished"):
        settle(ctx, run, driver)
    elif driver.trouble:
        raise StorageError(driver.trouble, hint=DAMAGED)


def start(ctx: Context) -> None:
    """Start the processes of runs that were placed. Each takes the disk a while, and requests wait for it."""
    each(ctx, launch, runs.in_states(ctx.store, RunState.STARTING), of_run, seconds=_LAUNCH_SECONDS)


def _stop(ctx: Context) -> None:
    each(ctx, stop_run, _active_runs(ctx), of_run)


def _keep_log(ctx: Context) -> None:
    """Raises StorageError as long as the daemon has no log of its own."""
    if ctx.storage.log_trouble:
        raise StorageError(ctx.storage.log_trouble, hint="Mend or remove it, then start the daemon again.")


def _keep_database(ctx: Context) -> None:
    """Raises StorageError when another file, or none, has the name of the database that is open."""
    if not ctx.store.is_in_place:
        trouble = f"{ctx.store.path} was removed or replaced"
        hint = "`lorad daemon stop`, then `lorad doctor --repair`: the journals have all of it."
        raise StorageError(f"{trouble}; the daemon works with the old one, which ends with it", hint=hint)


def _ring(ctx: Context) -> None:
    """Wake the readers of events when there are new ones."""
    newest = events.last_id(ctx.store)
    if newest != ctx.loop.newest:
        ctx.loop.newest = newest
        ctx.loop.ring()


PASS: tuple[Callable[[Context], None], ...] = (
    _tidy,
    find_lost_pools,
    watch_pools,
    watch_grants,
    _ingest,
    _confirm,
    _reap,
    keep_bill,
    heal,
    halve,
    keep_set_aside,
    watch_neighbours,
    give_way,
    keep_serving,
    place_requests,
    place_runs,
    keep_cluster,
    keep_forecasts,
    start,
    _stop,
    put_away_pools,
    prune_again,
    watch_journals,
    keep_leases,
    keep_history,
    keep_loaded,
    keep_table,
    keep_services,
    keep_budget,
    rotate,
    _keep_log,
    _keep_database,
    _ring,
)
"""The verbs of a pass, in order."""

ON_GROWTH: tuple[Callable[[Context], None], ...] = (
    watch_pools,
    _ingest,
    _confirm,
    halve,
    keep_loaded,
    keep_table,
    _ring,
)
"""The verbs of a pass when all that happened is that journals grew."""


def _active_runs(ctx: Context) -> list[RunRow]:
    return runs.in_states(ctx.store, *ACTIVE)
