"""End runs, pause them, and delete those that are over."""

import asyncio
import time
from pathlib import Path
from typing import Literal

from lorad.daemon.access import must_own_name, of_run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.daemon.storage.prune import REMOVED
from lorad.errors import Conflict
from lorad.files import remove_tree
from lorad.records.runs import Removed, Run
from lorad.states import EndReason, Move, RunState
from lorad.store import runs
from lorad.store.rows import RunRow


async def pause(ctx: Context, call: Call) -> Run:
    """Stop a run gracefully, so that it can be resumed.

    Raises Conflict when it is over, or is being stopped for good.
    """
    run = runs.get(ctx.store, call.run)
    _refuse_ended(run)
    if run.state == RunState.PAUSED:
        raise Conflict(f"run {call.run} is paused already", hint=f"`lorad resume {call.run}` continues.")
    if run.state == RunState.STOPPING:
        if run.wanted != "pause":
            message = f"run {call.run} is being ended ({run.wanted})"
            raise Conflict(message, hint="Resume it when it has ended.")
        runs.set_fields(ctx.store, call.run, preempted=None, yielded=None)  # the run stays paused
    elif run.state == RunState.QUEUED:
        runs.move(ctx.store, call.run, Move.PAUSE, by=call.caller.name)
    else:
        with ctx.store.write():
            runs.move(ctx.store, call.run, Move.STOP, detail="pause", by=call.caller.name)
            runs.set_fields(ctx.store, call.run, wanted="pause")
    ctx.loop.poke()
    return run_view(ctx, runs.get(ctx.store, call.run))


async def stop(ctx: Context, call: Call) -> Run:
    """Let a run finish its step, write a checkpoint and end. Raises Conflict when it has ended."""
    return _end(ctx, call, "stop", EndReason.STOPPED)


async def kill(ctx: Context, call: Call) -> Run:
    """End a run at once; what it did since its last checkpoint is lost. Raises Conflict when it has ended."""
    return _end(ctx, call, "kill", EndReason.KILLED)


def _end(ctx: Context, call: Call, how: Literal["stop", "kill"], reason: EndReason) -> Run:
    """End a run that waits, and ask one that works to end."""
    run = runs.get(ctx.store, call.run)
    _refuse_ended(run)
    who = call.caller.name
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        detail = f"{reason} while {run.state}"
        runs.move(ctx.store, run.name, Move.END, reason=reason, detail=detail, by=who)
    elif how == "kill" or run.state != RunState.STOPPING or run.wanted == "pause":
        with ctx.store.write():
            if run.state != RunState.STOPPING:
                runs.move(ctx.store, run.name, Move.STOP, detail=how, by=who)
            runs.set_fields(ctx.store, run.name, wanted=how, preempted=None, yielded=None)
    ctx.loop.poke()
    return run_view(ctx, runs.get(ctx.store, run.name))


def _refuse_ended(run: RunRow) -> None:
    if run.state == RunState.ENDED:
        hint = f"`lorad resume {run.name}` continues from its last checkpoint."
        raise Conflict(f"run {run.name} has ended already ({run.reason})", hint=hint)


async def remove(ctx: Context, call: Call) -> Removed:
    """Delete a run with everything that it wrote. Raises Conflict while it is not over, or is served."""
    await remove_run(ctx, call.run, call.caller.name)
    return Removed(call.run)


def replaceable(ctx: Context, caller: Caller, name: str) -> RunRow | None:
    """Find the run of this name, which another is to replace; None where there is none.

    Raises Conflict while it works, or a version of it is aliased or pinned, and NotAllowed.
    """
    if (run := runs.find(ctx.store, name)) is None:
        return None
    must_own_name(ctx, caller, name, of_run(ctx, caller, run))
    if not RunState(run.state).is_over:
        hint = f"`lorad stop {run.name}` or `lorad kill` first."
        raise Conflict(f"run {run.name} is {run.state}", hint=hint)
    runs.refuse_held(ctx.store, name)
    return run


async def remove_run(ctx: Context, name: str, by: str) -> None:
    """Delete a run that is over with everything that it wrote. Raises Conflict where it may not go."""
    doomed = forget(ctx, name, Path(runs.get(ctx.store, name).directory), by)
    ctx.loop.poke()
    await asyncio.to_thread(remove_tree, doomed)


def forget(ctx: Context, name: str, directory: Path, by: str) -> Path:
    """Remove the run's rows and rename its directory. Returns the new path."""
    doomed = directory.with_name(f"{REMOVED}{name}-{time.time_ns()}")
    try:
        with ctx.store.write():
            runs.remove(ctx.store, name, by=by)
            if directory.exists():
                directory.rename(doomed)
    except BaseException:
        if doomed.exists():
            doomed.rename(directory)
        raise
    return doomed
