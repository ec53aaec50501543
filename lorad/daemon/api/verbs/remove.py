"""Delete a run that is over, with everything that it wrote."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from pathlib import Path

from lorad.adapters.directory import TEMPORARY, discard
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
        raise Conflict(f"run {call.run} is {run.state}", hint=f"`lorad stop {call.run}` or `lorad kill` first.")
    doomed = forget(ctx, call.run, Path(run.directory), call.caller.name)
    ctx.waker.poke()
    await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)
    return Removed(call.run)


def forget(ctx: Context, name: str, directory: Path, by: str) -> Path:
    """The run is no more, and its directory has another name: that one."""
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


def sweep_removed(ctx: Context) -> None:
    """Finish what an earlier daemon had begun to delete, and take back what it had not said."""
    for doomed in ctx.runs_root.glob(f"{REMOVED}*"):
        name = doomed.name.removeprefix(REMOVED).rpartition("-")[0]
        run = runs.find(ctx.store, name)
        if run and Path(run.directory).parent == doomed.parent and not Path(run.directory).exists():
            doomed.rename(run.directory)
        else:
            shutil.rmtree(doomed, ignore_errors=True)


def sweep_half_made(ctx: Context) -> None:
    """Delete directories of runs whose making an earlier daemon did not survive.

    Only what a run is asked for with is in them, and no change in the daemon's journal is about them: so they are not
    those of a run that an older copy of the database lacks.
    """
    known = {*runs.names(ctx.store)}
    found = [path for path in ctx.runs_root.iterdir() if path.name not in known and is_half_made(path)]
    journal = ctx.home.journal.read_bytes() if found and ctx.home.journal.exists() else b""
    for path in found:
        if f'"run":{json.dumps(path.name)}'.encode() not in journal:
            log.warning("run %s: it was never made whole, and its directory is deleted", path.name)
            discard(path)


def is_half_made(path: Path) -> bool:
    if path.name.startswith((REMOVED, TEMPORARY)) or path.is_symlink() or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    files = ("spec.yaml", "spec.json", "request.json")
    asked = {*files, *(f".{name}.tmp" for name in files), "origin", "reference"}
    return bool(names) and names <= asked
