"""Only the daemon deletes: checkpoints and version files that nothing can ask for, and leftovers of dead writers."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path

from lorad.adapters.directory import TEMPORARY, discard
from lorad.daemon.context import Context, run_dir, spec_of
from lorad.errors import NotFound
from lorad.paths import RunDir
from lorad.states import RunState
from lorad.store.checkpoints import checkpoints, mark_deleted
from lorad.store.db import Row
from lorad.store.versions import get_version

log = logging.getLogger("lorad.daemon")

CHECKPOINT = re.compile(r"(\d{6,})-a(\d+)")
LEFTOVER_SECONDS = 60.0  # a pool may still be writing what its dead driver asked for


def prune(ctx: Context, run: Row) -> None:
    """Delete what the `checkpoint` section of the spec does not keep. Nothing while an attempt begins."""
    if run["state"] not in (RunState.RUNNING, RunState.PAUSED, RunState.ENDED) or run["resume_step"] is not None:
        return
    sweep(run_dir(run))
    kept = checkpoints(ctx.store, run["name"])[-spec_of(run).checkpoint.keep :]
    prune_checkpoints(ctx, run, kept)
    prune_versions(ctx, run, kept)
    prune_samples(run)


def prune_checkpoints(ctx: Context, run: Row, kept: list[Row]) -> None:
    sql = "SELECT step, attempt, deleted_at FROM checkpoints WHERE run = ?"
    known = {(row["step"], row["attempt"]): row["deleted_at"] for row in ctx.store.rows(sql, (run["name"],))}
    wanted = {(row["step"], row["attempt"]) for row in kept}
    for path in listed(run_dir(run).checkpoints):
        match = CHECKPOINT.fullmatch(path.name)
        if match is None:
            continue
        key = int(match[1]), int(match[2])
        is_unknown = key not in known and key[1] == run["attempt"]  # its record is on its way
        if key in wanted or is_unknown:
            continue
        if known.get(key, 0.0) is None:
            mark_deleted(ctx.store, run["name"], *key)
        remove(ctx, path)


def prune_versions(ctx: Context, run: Row, kept: list[Row]) -> None:
    keep = spec_of(run).checkpoint.keep_versions
    if not keep:
        return
    present = [path for path in listed(run_dir(run).versions) if path.name.isdigit()]
    needed = {row["version"] for row in kept}
    for path in present[:-keep]:
        if int(path.name) not in needed and is_free(ctx, run["name"], int(path.name)):
            remove(ctx, path)


def is_free(ctx: Context, run: str, number: int) -> bool:
    """Nobody has pinned or aliased the version; one without a row yet is on its way."""
    try:
        row = get_version(ctx.store, run, number)
    except NotFound:
        return False
    return not row["pinned"] and not row["aliases"]


def prune_samples(run: Row) -> None:
    keep = spec_of(run).checkpoint.keep_samples
    for path in sorted(listed(run_dir(run).samples), key=age)[:-keep] if keep else []:
        path.unlink()


def age(samples: Path) -> tuple[int, int]:
    """Attempt and step: what a resume does again is newer than what it goes back behind."""
    step, _, attempt = samples.stem.partition("-a")
    return int(attempt or 0), int(step)


def remove(ctx: Context, path: Path) -> None:
    """A directory that was to stay whole goes by a rename first: nobody sees half of it."""
    log.info("deleting %s", path)
    doomed = path.with_name(f"{TEMPORARY}{path.name}-deleted")
    path.rename(doomed)
    ctx.spawn(asyncio.to_thread(discard, doomed))


def sweep(directory: RunDir) -> None:
    """Remove what writers left behind when they died."""
    for parent in (directory.versions, directory.checkpoints):
        for path in listed(parent):
            if path.name.startswith(TEMPORARY) and time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                discard(path)


def listed(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []
