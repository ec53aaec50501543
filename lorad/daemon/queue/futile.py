"""How often a run made no progress.

A lost pool counts against one run alone: the youngest of those in it that got no further. So the runs of a
pool that is lost again and again give up one at a time, the last that came first, and
`resources.max_restarts` bounds how often any of them comes back.
"""

from lorad.daemon.context import Context
from lorad.daemon.queue.tenants import life_number
from lorad.states import ACTIVE, EndReason, RunState
from lorad.store import events, runs
from lorad.store.metrics import furthest_steps
from lorad.store.rows import RunRow

_ASKED_FOR = (EndReason.STOPPED, EndReason.KILLED)
_EXCUSED = "excused"  # the event of an attempt that does not count as futile


def futile_attempts(ctx: Context, name: str, before: int | None = None) -> int:
    """Count the newest attempts in a row, up to number `before`, that made no step further than those before
    them.
    """
    reached = furthest_steps(ctx.store, name)
    excused = _excused_attempts(ctx, name)
    best = futile = 0
    for attempt in runs.attempts(ctx.store, name):
        if before is not None and attempt.attempt >= before:
            break
        step = reached.get(attempt.attempt, 0)
        blameless = attempt.attempt in excused or attempt.reason in _ASKED_FOR
        futile = 0 if step > best else futile + (not blameless)
        best = max(best, step)
    return futile


def _excused_attempts(ctx: Context, name: str) -> set[int]:
    return {excused["attempt"] for excused in events.of_kind(ctx.store, name, _EXCUSED)}


def excuse(ctx: Context, run: RunRow) -> None:
    """Pardon a run that lost its pool, if a younger one in it got no further either."""
    if _is_stuck(ctx, run) and any(
        other.created_at > run.created_at and _is_stuck(ctx, other) for other in _beside(ctx, run)
    ):
        pardon(ctx, run, f"pool {run.pool} was lost, and a younger run in it got no further either")


def pardon(ctx: Context, run: RunRow, why: str) -> None:
    """Do not count the attempt of a run that is not to blame for its end."""
    events.append(ctx.store, run.name, _EXCUSED, {"attempt": run.attempt, "why": why})


def _beside(ctx: Context, run: RunRow) -> list[RunRow]:
    """List the other runs that were in the same life of the pool and run there or wait for their restart."""
    life, there = life_number(run), runs.in_states(ctx.store, RunState.QUEUED, *ACTIVE)
    others = [other for other in there if other.pool == run.pool and other.name != run.name]
    return [other for other in others if life is not None and life_number(other) == life]


def _is_stuck(ctx: Context, run: RunRow) -> bool:
    """Check whether its newest attempt has made no step further than those before."""
    reached = furthest_steps(ctx.store, run.name)
    before = max((step for attempt, step in reached.items() if attempt < run.attempt), default=0)
    return reached.get(run.attempt, 0) <= before
