"""Automatic restarts: how long they wait, how many there are.

The store holds what a new daemon needs to continue.
"""

import time

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context, spec_of
from lorad.daemon.process.processes import read_status
from lorad.daemon.queue.futile import futile_attempts, pardon
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.rows import RunRow

_FUTILE = 3  # attempts in a row without a step further than ever before: no more automatic restarts
MENDABLE = (EndReason.FAILED, EndReason.LOST)


def restart(ctx: Context, run: RunRow, reason: EndReason, life: AttemptDir | None) -> None:
    """Queue a run that failed again when its spec wants that and it gets anywhere.

    life: of the run's pool. One that never began found a lock taken that was free when the run was placed.
    """
    name, resources = run.name, spec_of(run).resources
    if not run.wanted and life is not None and (read_status(life) or {}).get("locked"):
        pardon(ctx, run, "another daemon got the device first")
        runs.move(ctx.store, name, Move.RESUME, detail="another daemon got the device first")
        return
    goes_on = not run.wanted or (run.wanted == "pause" and run.preempted)
    if resources.restart == "never" or reason not in MENDABLE or not goes_on:
        return
    futile, made = futile_attempts(ctx, name), runs.restarts(ctx.store, name)
    enough = ""
    if futile >= _FUTILE:
        enough = f"{futile} attempts got no further"
    elif made >= resources.max_restarts:
        enough = f"no more restarts after {made} (resources.max_restarts); `lorad resume {name}` continues"
    if enough:
        runs.set_fields(ctx.store, name, detail=f"{runs.get(ctx.store, name).detail}; {enough}")
        return
    runs.move(ctx.store, name, Move.RESTART, detail=f"restart after {reason}")
    seconds = delay(ctx, futile)
    waiting = f"restarts {seconds:.0f} s after attempt {run.attempt} was {reason}"
    runs.set_fields(ctx.store, name, waiting=waiting, restart_at=time.time() + seconds)
    ctx.queue.not_before[name] = time.monotonic() + seconds


def delay(ctx: Context, futile: int) -> float:
    """Seconds before the next attempt: twice as many with each that got no further."""
    return float(min(ctx.patience.restart * 2**futile, ctx.patience.restart_most))


def wait_for_restart(ctx: Context, run: RunRow) -> str:
    """Say that a queued run waits for its restart, which another daemon may have planned; "" when it need not
    wait.
    """
    name = run.name
    if run.restart_at is None:
        ctx.queue.not_before.pop(name, None)
        return ""
    if name not in ctx.queue.not_before:
        ctx.queue.not_before[name] = time.monotonic() + _left(ctx, run)
    if time.monotonic() < ctx.queue.not_before[name]:
        return str(run.waiting)
    runs.set_fields(ctx.store, name, restart_at=None)
    return ""


def _left(ctx: Context, run: RunRow) -> float:
    """Seconds; by the clock on the wall, which may have been set meanwhile."""
    whole = delay(ctx, futile_attempts(ctx, run.name))
    return min(whole, max(0.0, (run.restart_at or 0.0) - time.time()))
