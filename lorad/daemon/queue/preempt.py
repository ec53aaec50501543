"""Runs of lower priority stop at their next step for one of higher priority, and are queued again.

They pause with a checkpoint, so nothing is lost but the time until there is room again. `choose.py` says who
stops, and `place.py` asks them to.
"""

from lorad.daemon.access import name_for
from lorad.daemon.context import Context
from lorad.states import Move
from lorad.store import runs
from lorad.store.rows import RunRow


def queue_again(ctx: Context, run: RunRow) -> None:
    """Queue a run again that was paused to make room, in the same transaction:
    it resumes when there is room.
    """
    if run.preempted:
        why = f"preempted by {name_for(ctx, run, run.preempted)}"
        runs.move(ctx.store, run.name, Move.RESUME, detail=why, also={"preempted": run.preempted})
    elif run.yielded:
        runs.move(ctx.store, run.name, Move.RESUME, detail=run.yielded)
