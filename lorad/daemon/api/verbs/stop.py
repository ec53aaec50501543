"""A graceful stop: finish the step, checkpoint, end."""

from __future__ import annotations

from lorad.client.shapes import Run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.errors import Conflict
from lorad.states import EndReason, Move, RunState
from lorad.store import runs
from lorad.store.rows import RunRow


async def handle(ctx: Context, call: Call) -> Run:
    """Raises Conflict when the run has ended."""
    run = runs.get(ctx.store, call.run)
    refuse_ended(run)
    who = call.caller.name
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        ctx.move(call.run, Move.END, reason=EndReason.STOPPED, detail=f"stopped while {run.state}", by=who)
    elif run.state != RunState.STOPPING:
        with ctx.store.write():
            ctx.move(call.run, Move.STOP, detail="stop", by=who)
            runs.set_fields(ctx.store, call.run, wanted="stop")
    elif run.wanted == "pause":
        runs.set_fields(ctx.store, call.run, wanted="stop", preempted=None)
    ctx.loop.poke()
    return run_view(runs.get(ctx.store, call.run))


def refuse_ended(run: RunRow) -> None:
    if run.state == RunState.ENDED:
        hint = f"`lorad resume {run.name}` continues from its last checkpoint."
        raise Conflict(f"run {run.name} has ended already ({run.reason})", hint=hint)
