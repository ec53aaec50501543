"""Queue a new attempt from a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.adapters.directory import verify
from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.daemon.views import run_view
from lorad.errors import Conflict, IntegrityError, NotFound
from lorad.specs import Positive
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.checkpoints import checkpoints
from lorad.store.db import Row


class Body(Struct):
    step: int | None = None
    steps: Positive | None = None


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Raises NotFound (no such checkpoint), IntegrityError (it is damaged), Conflict (not over, or nothing to do)."""
    body, run = call.json(Body), runs.get(ctx.store, call.run)
    if not RunState(run["state"]).is_over:
        raise Conflict(f"run {call.run} is {run['state']}", hint="Only a paused or ended run can be resumed.")
    chosen = choose(run, checkpoints(ctx.store, call.run), body.step)
    steps, done = body.steps or run["steps"], chosen["step"] if chosen else 0
    if steps <= done:
        hint = f"Give more, as in `lorad resume {call.run} --steps {done + run['steps']}`, or --from an earlier step."
        raise Conflict(f"run {call.run} is to make {steps} steps, and its checkpoint has {done}", hint=hint)
    if chosen:
        await asyncio.to_thread(check, call.run, chosen, checkpoints(ctx.store, call.run))
    with ctx.store.write():
        ctx.move(call.run, Move.RESUME, detail=f"from step {done}", by=call.caller.name)
        runs.set_fields(ctx.store, call.run, steps=steps, resume_step=done if chosen else None)
    ctx.waker.poke()
    return run_view(runs.get(ctx.store, call.run))


def choose(run: Row, present: list[Row], step: int | None) -> Row | None:
    """The newest checkpoint, or the newest at `step`; None: from the start, as there is none."""
    at_step = [row for row in present if step is None or row["step"] == step]
    if at_step or step is None:
        return at_step[-1] if at_step else None
    known = ", ".join(str(row["step"]) for row in present) or "none"
    raise NotFound(f"run {run['name']} has no checkpoint at step {step}", hint=f"There are checkpoints at: {known}.")


def check(name: str, chosen: Row, present: list[Row]) -> None:
    """Raises IntegrityError with the checkpoint before as the way out."""
    try:
        verify(Path(chosen["path"]))
    except IntegrityError as error:
        before = [row["step"] for row in present if row["step"] < chosen["step"]]
        hint = "There is no checkpoint before it."
        if before:
            hint = f"Go on from the one before: `lorad resume {name} --from {before[-1]}`."
        raise IntegrityError(f"checkpoint at step {chosen['step']}: {error.message}", hint=hint) from None
