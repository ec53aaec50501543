"""Delete the files of all runs that nothing can ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.adapters.directory import discard
from lorad.daemon.context import Context
from lorad.daemon.handlers.remove import REMOVED
from lorad.daemon.pools import refresh
from lorad.daemon.prune import Doomed, delete, doomed
from lorad.daemon.request import Call
from lorad.states import RunState
from lorad.store import runs

ORPHAN_SECONDS = 3600.0  # a run's directory is there before its row


class Body(Struct):
    dry_run: bool = False


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """By the rules of each run's `checkpoint` section; what was pinned, aliased or loaded meanwhile stays."""
    body = call.json(Body)
    await refresh(ctx)
    sizes = await asyncio.to_thread(measure, everything(ctx))
    found = [item for item in everything(ctx) if item.path in sizes]
    if not body.dry_run:
        gone = [path for item in found if (path := delete(ctx, item)) is not None]
        await asyncio.to_thread(discard_all, gone)
    deleted = [{"run": i.run, "path": str(i.path), "bytes": sizes[i.path], "why": i.why} for i in found]
    return {"deleted": deleted, "bytes": sum(sizes[item.path] for item in found), "dry_run": body.dry_run}


def everything(ctx: Context) -> list[Doomed]:
    return [item for run in runs.in_states(ctx.store, *RunState) for item in doomed(ctx, run)] + orphans(ctx)


def orphans(ctx: Context) -> list[Doomed]:
    """Directories of runs that were removed. What no event tells of is left alone: the database may be an old one."""
    known = {run["name"] for run in runs.in_states(ctx.store, *RunState)}
    found = []
    for path in sorted(ctx.runs_root.iterdir()):
        if path.name.startswith(REMOVED) or (path.name not in known and was_removed(ctx, path)):
            found.append(Doomed("", path, "run", "its run was removed"))
    return found


def was_removed(ctx: Context, path: Path) -> bool:
    if not ctx.store.row("SELECT 1 FROM events WHERE run = ? AND kind = 'removed'", (path.name,)):
        return False
    return path.is_dir() and time.time() - path.stat().st_mtime > ORPHAN_SECONDS


def measure(items: Iterable[Doomed]) -> dict[Path, int]:
    """Bytes of files."""
    return {item.path: size(item.path) for item in items}


def size(path: Path) -> int:
    try:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        return sum(file.lstat().st_size for file in files)
    except FileNotFoundError:  # somebody else deletes it
        return 0


def discard_all(paths: Iterable[Path]) -> None:
    for path in paths:
        discard(path)
