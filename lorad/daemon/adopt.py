"""Adopt the pools and drivers that an earlier daemon left, and end those that no row names."""

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
from lorad.states import ACTIVE
from lorad.store import runs

log = logging.getLogger("lorad.daemon")

_RECENT = 200  # ended runs that are pruned at the start


def adopt(ctx: Context) -> None:
    """Do the first work of a daemon; files that cannot be read do not keep it from starting. The loop then
    inspects the attempt of every active run.

    Raises OSError, and NotAllowed where others could replace the directory of the runs.
    """
    root = ctx.runs_root
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    refuse_open(root.parent, shared_place=True)
    refuse_open(root)
    if ctx.users.shared and (is_new or root.stat().st_uid == os.geteuid()):
        passable(root)
    for verb in (
        relocate,
        finish_renames,
        sweep_removed,
        sweep_half_made,
        _sweep_unfinished,
        adopt_pools,
        _look_at_pools,
        adopt_grants,
        keep_set_aside,
        _stop_strangers,
        _leave_to_loop,
    ):
        guarded(ctx, Item(), verb)


def _leave_to_loop(ctx: Context) -> None:
    """Let the loop prune the newest runs, and look at every journal: it may have been replaced meanwhile."""
    ctx.storage.unpruned |= {run.name for run in runs.list_runs(ctx.store, all=False, limit=_RECENT)}
    ctx.storage.doubted |= {*runs.names(ctx.store)}


def _sweep_unfinished(ctx: Context) -> None:
    sweep_leftovers(ctx.runs_root)


def _look_at_pools(ctx: Context) -> None:
    pools = list(ctx.pools.values())
    each(ctx, look_at_process, pools, of_pool)
    for pool in (pool for pool in pools if pool.process.is_up):
        log.info("pool %s: adopted, pid %s", pool.id, pool.process.pid)


def _stop_strangers(ctx: Context) -> None:
    """Ask every driver to stop that is not the present attempt of an active run: it saves what it has."""
    at_work = {run.name: run.attempt for run in runs.in_states(ctx.store, *ACTIVE)}

    def stop_strangers_in(ctx: Context, directory: Path) -> None:
        name = directory.name
        if name not in at_work:
            for path in leftovers_in(RunDir(directory), before=time.time()):  # of writers that died
                discard(path)
        for attempt in attempts_under(directory) if not name.startswith(REMOVED) else []:
            if at_work.get(name) != int(attempt.root.name) and ctx.processes.signal(attempt, signal.SIGTERM):
                log.warning("run %s: attempt %s worked unknown to the store", name, attempt.root.name)

    each(ctx, stop_strangers_in, sorted(ctx.runs_root.iterdir()), lambda path: Item(f"run {path.name}"))
