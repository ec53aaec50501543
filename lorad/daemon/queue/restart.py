"""Queue runs again that made room for others, or that failed.

Runs that make room pause with a checkpoint, so nothing is lost but the time until there is room again.
`choose.py` says which stop, and `place.py` asks them to. For automatic restarts it is decided here how many
there are, how long they wait, and which run counts a lost pool as its own.

A lost pool counts against one run alone: the youngest of those in it that got no further. So the runs of a
pool that is lost again and again give up one at a time, the youngest first, and
`resources.max_restarts` bounds how often any of them comes back.

The store holds what a new daemon needs to continue.
"""

import time

from msgspec.structs import replace

from lorad.box.paths import AttemptDir
from lorad.daemon.access import name_for
from lorad.daemon.context import Context, spec_of
from lorad.daemon.process.processes import read_status
from lorad.daemon.queue.tenants import has_joined, life_number
from lorad.states import ACTIVE, EndReason, Move, RunState
from lorad.store import events, runs
from lorad.store.metrics import furthest_steps
from lorad.store.rows import RunRow
from lorad.text import clauses

_FUTILE = 3  # attempts in a row without a step further than ever before: no more automatic restarts
MENDABLE = (EndReason.FAILED, EndReason.LOST)
_ASKED_FOR = (EndReason.STOPPED, EndReason.KILLED)
_EXCUSED = "excused"  # the event of an attempt that does not count as futile


def queue_again(ctx: Context, run: RunRow) -> None:
    """Queue a run again that was paused to make room, in the same transaction as its pause."""
    if run.preempted:
        why = f"preempted by {name_for(ctx, run, run.preempted)}"
        runs.move(ctx.store, run.name, Move.RESUME, detail=why, also={"preempted": run.preempted})
    elif run.yielded:
        runs.move(ctx.store, run.name, Move.RESUME, detail=run.yielded)


def restart(
    ctx: Context, run: RunRow, reason: EndReason, life: AttemptDir | None, *, never_began: bool
) -> None:
    """Queue a run that failed again when its spec wants that and it gets anywhere.

    An attempt that was placed a moment too soon is made again at once: the pool's life never began, as it
    found a lock taken that was free when the run was placed; or it was up for others and ended as the run
    came, which is excused once.

    life: the life of the run's pool.
    never_began: the pool was gone before the run had begun.
    """
    name = run.name
    resources = spec_of(run).resources
    why = enough = ""
    if not run.wanted and life is not None and (read_status(life) or {}).get("locked"):
        why = "another daemon got the device first"
    elif not run.wanted and never_began and has_joined(run):
        excused = [event["attempt"] for event in events.of_kind(ctx.store, name, _EXCUSED, limit=1)]
        why = "" if run.attempt - 1 in excused else f"pool {run.pool} ended as the run joined it"
    if why:
        pardon(ctx, run, why)
        runs.move(ctx.store, name, Move.RESUME, detail=why)
        return
    goes_on = not run.wanted or (run.wanted == "pause" and (run.preempted or run.yielded))
    if resources.restart == "never" or reason not in MENDABLE or not goes_on:
        return
    futile = futile_attempts(ctx, name)
    count = runs.restarts(ctx.store, name)
    if futile >= _FUTILE:
        enough = f"{futile} attempts got no further"
    elif count >= resources.max_restarts:
        enough = f"no more restarts after {count} (resources.max_restarts); `lorad resume {name}` continues"
    if enough:
        runs.set_fields(ctx.store, name, detail=clauses(runs.get(ctx.store, name).detail, enough))
        return
    seconds = delay(ctx, futile)
    waiting = f"restarts {seconds:.0f} s after attempt {run.attempt} was {reason}"
    plan = {"waiting": waiting, "restart_at": time.time() + seconds}
    runs.move(ctx.store, name, Move.RESTART, detail=f"restart after {reason}", also=plan)
    ctx.queue.not_before[name] = time.monotonic() + seconds


def delay(ctx: Context, futile: int) -> float:
    """Choose the seconds before the next attempt: twice as many with each that got no further."""
    return float(min(ctx.patience.restart * 2**futile, ctx.patience.restart_most))


def wait_for_restart(ctx: Context, run: RunRow) -> str:
    """Say that a queued run waits for its restart; "" when it need not wait."""
    name = run.name
    if run.restart_at is None:
        ctx.queue.not_before.pop(name, None)
        return ""
    if name not in ctx.queue.not_before:
        left = max(0.0, run.restart_at - time.time())  # by a clock that may have been set meanwhile
        ctx.queue.not_before[name] = time.monotonic() + min(delay(ctx, futile_attempts(ctx, name)), left)
    if time.monotonic() < ctx.queue.not_before[name]:
        return str(run.waiting)
    runs.set_fields(ctx.store, name, restart_at=None)
    return ""


def futile_attempts(ctx: Context, name: str, before: int | None = None) -> int:
    """Count the newest attempts in a row, up to number `before`, that got no further than earlier ones."""
    reached = furthest_steps(ctx.store, name)
    excused = {event["attempt"] for event in events.of_kind(ctx.store, name, _EXCUSED)}
    best = futile = 0
    for attempt in runs.attempts(ctx.store, name):
        if before is not None and attempt.attempt >= before:
            break
        step = reached.get(attempt.attempt, 0)
        blameless = attempt.attempt in excused or attempt.reason in _ASKED_FOR
        futile = 0 if step > best else futile + (not blameless)
        best = max(best, step)
    return futile


def excuse(ctx: Context, run: RunRow) -> None:
    """Pardon a run that lost its pool, if a younger one in the same life of the pool got no further either.

    The others run there, wait for their restart, or have begun the next attempt sooner than this run ended.
    """
    life = life_number(run)
    if life is None or not _is_stuck(ctx, run):
        return
    for other in runs.in_states(ctx.store, RunState.QUEUED, *ACTIVE):
        if other.pool != run.pool or other.name == run.name or other.created_at <= run.created_at:
            continue
        attempts = [replace(other, attempt=attempt) for attempt in (other.attempt, other.attempt - 1)]
        if any(life_number(attempt) == life and _is_stuck(ctx, attempt) for attempt in attempts):
            pardon(ctx, run, f"pool {run.pool} was lost, and a younger run in it got no further either")
            return


def pardon(ctx: Context, run: RunRow, why: str) -> None:
    """Note that a run is not to blame for the end of its attempt, which does not count as futile."""
    events.append(ctx.store, run.name, _EXCUSED, {"attempt": run.attempt, "why": why})


def _is_stuck(ctx: Context, run: RunRow) -> bool:
    """Check whether its newest attempt got no further than earlier ones."""
    reached = furthest_steps(ctx.store, run.name)
    before = max((step for attempt, step in reached.items() if attempt < run.attempt), default=0)
    return reached.get(run.attempt, 0) <= before
