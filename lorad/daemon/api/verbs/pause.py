"""A graceful stop that stays resumable."""

from __future__ import annotations

from lorad.client.shapes import Run
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.stop import refuse_ended
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.errors import Conflict
from lorad.states import Move, RunState
from lorad.store import runs


async def handle(ctx: Context, call: Call) -> Run:
    """Raises Conflict when the run is over, or is being stopped for good."""
    run = runs.get(ctx.store, call.run)
    refuse_ended(run)
    if run.state == RunState.PAUSED:
        raise Conflict(f"run {call.run} is paused already", hint=f"`lorad resume {call.run}` continues.")
    if run.state == RunState.STOPPING:
        if run.wanted != "pause":
            raise Conflict(
                f"run {call.run} is being ended ({run.wanted})", hint="Resume it when it has ended."
            )
        runs.set_fields(ctx.store, call.run, preempted=None)  # the run stays paused
    elif run.state == RunState.QUEUED:
        ctx.move(call.run, Move.PAUSE, by=call.caller.name)
    else:
        with ctx.store.write():
            ctx.move(call.run, Move.STOP, detail="pause", by=call.caller.name)
            runs.set_fields(ctx.store, call.run, wanted="pause")
    ctx.loop.poke()
    return run_view(runs.get(ctx.store, call.run))
