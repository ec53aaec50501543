"""End a run at once; what it did since its last checkpoint is lost."""

from __future__ import annotations

from lorad.client.shapes import Run
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.stop import refuse_ended
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.states import EndReason, Move, RunState
from lorad.store import runs


async def handle(ctx: Context, call: Call) -> Run:
    """Raises Conflict when the run has ended."""
    run = runs.get(ctx.store, call.run)
    refuse_ended(run)
    who = call.caller.name
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        ctx.move(call.run, Move.END, reason=EndReason.KILLED, detail=f"killed while {run.state}", by=who)
    else:
        with ctx.store.write():
            if run.state != RunState.STOPPING:
                ctx.move(call.run, Move.STOP, detail="kill", by=who)
            runs.set_fields(ctx.store, call.run, wanted="kill", preempted=None)
    ctx.loop.poke()
    return run_view(runs.get(ctx.store, call.run))
