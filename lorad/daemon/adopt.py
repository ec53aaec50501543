"""What a daemon does first: know the pools and drivers that an earlier one left, and end those that nobody knows."""

from __future__ import annotations

import logging
import signal

from lorad.adapters.directory import sweep as sweep_leftovers
from lorad.daemon.belongings import passable
from lorad.daemon.context import Context
from lorad.daemon.handlers.remove import sweep_half_made, sweep_removed
from lorad.daemon.pools import adopt_pools, look_at_process
from lorad.daemon.processes import attempts_under
from lorad.daemon.prune import REMOVED, sweep
from lorad.paths import RunDir
from lorad.states import RunState
from lorad.store import runs

log = logging.getLogger("lorad.daemon")


def adopt(ctx: Context) -> None:
    """Runs are adopted by their rows: the reconcile loop inspects the attempt of every active one."""
    passable(ctx.runs_root) if ctx.system else ctx.runs_root.mkdir(parents=True, exist_ok=True, mode=0o700)
    sweep_removed(ctx)
    sweep_half_made(ctx)
    sweep_leftovers(ctx.runs_root)
    adopt_pools(ctx)
    for pool in ctx.pools.values():
        look_at_process(ctx, pool)
        if pool.process.is_up:
            log.info("pool %s: adopted, pid %s", pool.id, pool.process.pid)
    stop_strangers(ctx)


def stop_strangers(ctx: Context) -> None:
    """A driver that is not the present attempt of an active run is asked to stop: it saves what it has."""
    active = runs.in_states(ctx.store, RunState.STARTING, RunState.RUNNING, RunState.STOPPING)
    known = {(run["name"], run["attempt"]) for run in active}
    for directory in sorted(ctx.runs_root.iterdir()):
        if directory.name not in {run for run, _ in known}:
            sweep(RunDir(directory))
        for attempt in attempts_under(directory) if not directory.name.startswith(REMOVED) else []:
            if (directory.name, int(attempt.root.name)) in known:
                continue
            if ctx.processes.signal(attempt, signal.SIGTERM):
                log.warning("run %s: attempt %s worked unknown to the store", directory.name, attempt.root.name)
