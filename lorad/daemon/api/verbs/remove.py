"""Delete a run that is over, with everything that it wrote."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from lorad.client.shapes import Removed
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.storage.prune import REMOVED
from lorad.errors import Conflict
from lorad.states import RunState
from lorad.store import runs

log = logging.getLogger("lorad.daemon")


async def handle(ctx: Context, call: Call) -> Removed:
    """Raises Conflict while it works or is queued, or an alias serves one of its versions."""
    run = runs.get(ctx.store, call.run)
    if not RunState(run.state).is_over:
        raise Conflict(
            f"run {call.run} is {run.state}", hint=f"`lorad stop {call.run}` or `lorad kill` first."
        )
    doomed = forget(ctx, call.run, Path(run.directory), call.caller.name)
    ctx.loop.poke()
    await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)
    return Removed(call.run)


def forget(ctx: Context, name: str, directory: Path, by: str) -> Path:
    """Remove the run's rows and rename its directory. Returns the new path."""
    doomed = directory.with_name(f"{REMOVED}{name}-{time.time_ns()}")
    try:
        with ctx.store.write():
            runs.remove(ctx.store, name, by=by)
            ctx.journal.append("removed", name, by)
            if directory.exists():
                directory.rename(doomed)
    except BaseException:
        if doomed.exists():
            doomed.rename(directory)
        raise
    return doomed
