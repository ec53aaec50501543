"""End drivers: SIGTERM for a graceful stop, SIGKILL to the group for a kill or a driver without a pool."""

import logging
import signal
import time

from lorad.daemon.context import Context
from lorad.daemon.process.processes import condemn
from lorad.daemon.queue.tenants import life_of
from lorad.states import RunState
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")


def stop(ctx: Context, run: RunRow) -> None:
    """Stop or kill the driver of a run when that was asked for, or its pool is gone; insist now and then."""
    if run.state == RunState.STOPPING:
        _send(ctx, run, signal.SIGKILL if run.wanted == "kill" else signal.SIGTERM)
    life = life_of(ctx, run)
    if life is not None and (life[1].is_up or life[1].phase == "absent"):
        ctx.pools.gone_since.pop(run.name, None)
        return
    since = ctx.pools.gone_since.setdefault(run.name, time.monotonic())
    # a run that has yet to begin has nothing to save; another driver had time to notice
    if run.state == RunState.STARTING or time.monotonic() - since > ctx.patience.pool_gone:
        _send(ctx, run, signal.SIGKILL)


def _send(ctx: Context, run: RunRow, number: signal.Signals) -> None:
    attempt = run.attempt_dir
    last, at = ctx.processes.signalled.get(attempt.root, (0, 0.0))
    if last == number and time.monotonic() - at < ctx.patience.signal_again:
        return
    if ctx.processes.inspect(attempt).phase == "absent":
        condemn(attempt)
    elif number == signal.SIGKILL:
        if not ctx.processes.kill_group(attempt):
            return
    elif not ctx.processes.signal(attempt, number):
        return
    ctx.processes.signalled[attempt.root] = (number, time.monotonic())
    log.info("run %s: %s to its driver", run.name, number.name)
