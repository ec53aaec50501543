"""The first work of a daemon: find the pools and drivers that an earlier one left, and end those that no row
knows.
"""

import logging
import os
import signal
import time
from pathlib import Path

from lorad.adapters.directory import discard
from lorad.adapters.directory import sweep as sweep_leftovers
from lorad.box.paths import RunDir, refuse_open
from lorad.daemon.context import Context
from lorad.daemon.guarded import each, guarded, of_pool
from lorad.daemon.pool import Pool
from lorad.daemon.pools.grants import adopt_grants
from lorad.daemon.pools.life import adopt_pools, look_at_process
from lorad.daemon.process.processes import attempts_under
from lorad.daemon.process.user_files import passable
from lorad.daemon.queue.set_aside import keep_set_aside
from lorad.daemon.record.relocate import relocate
from lorad.daemon.runs.rename import finish_renames
from lorad.daemon.storage.prune import REMOVED, leftovers_in
from lorad.daemon.storage.unfinished import sweep_half_made, sweep_removed
from lorad.daemon.troubles import Item
from lorad.states import RunState
from lorad.store import runs

log = logging.getLogger("lorad.daemon")

_RECENT = 200  # ended runs that are pruned at the start


def adopt(ctx: Context) -> None:
    """Adopt the runs by their rows: the reconcile loop inspects the attempt of every active one.

    Something that cannot be read does not keep the daemon from starting. Raises OSError, and NotAllowed where
    others could put something else in the place of the runs' directory.
    """
    root = ctx.runs_root
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    refuse_open(root.parent, shared_place=True)
    refuse_open(root)
    if ctx.users.shared and (is_new or root.stat().st_uid == os.geteuid()):
        passable(root)
    sweeps = sweep_removed, sweep_half_made, _sweep_unfinished
    for verb in (
        relocate,
        finish_renames,
        *sweeps,
        adopt_pools,
        _look_at_pools,
        adopt_grants,
        keep_set_aside,
        _stop_strangers,
        _leave_to_loop,
    ):
        guarded(ctx, Item(), verb)


def _leave_to_loop(ctx: Context) -> None:
    """Let the loop delete what the daemon before did not come to delete, and look at every journal: while no
    daemon worked anybody could put another one there.
    """
    ctx.storage.unpruned |= {run.name for run in runs.list_runs(ctx.store, all=False, limit=_RECENT)}
    ctx.storage.doubted |= {*runs.names(ctx.store)}


def _sweep_unfinished(ctx: Context) -> None:
    sweep_leftovers(ctx.runs_root)


def _look_at_pools(ctx: Context) -> None:
    def look_at_pool(ctx: Context, pool: Pool) -> None:
        look_at_process(ctx, pool)
        if pool.process.is_up:
            log.info("pool %s: adopted, pid %s", pool.id, pool.process.pid)

    each(ctx, look_at_pool, list(ctx.pools.values()), of_pool)


def _stop_strangers(ctx: Context) -> None:
    """Ask every driver to stop that is not the present attempt of an active run: it saves what it has."""
    active = runs.in_states(ctx.store, RunState.STARTING, RunState.RUNNING, RunState.STOPPING)
    at_work = {(run.name, run.attempt) for run in active}

    def stop_strangers_in(ctx: Context, directory: Path) -> None:
        if directory.name not in {run for run, _ in at_work}:
            for path in leftovers_in(RunDir(directory), before=time.time()):  # of writers that died
                discard(path)
        for attempt in attempts_under(directory) if not directory.name.startswith(REMOVED) else []:
            if (directory.name, int(attempt.root.name)) in at_work:
                continue
            if ctx.processes.signal(attempt, signal.SIGTERM):
                log.warning(
                    "run %s: attempt %s worked unknown to the store", directory.name, attempt.root.name
                )

    each(ctx, stop_strangers_in, sorted(ctx.runs_root.iterdir()), lambda path: Item(f"run {path.name}"))
