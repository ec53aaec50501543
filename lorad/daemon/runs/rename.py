"""Give a run another name, and its directory too.

The rows change first. Where the daemon dies before it has renamed the directory, the next daemon does that
(`finish_renames`); where it dies before the row has the new path, `relocate` corrects it.
"""

import contextlib
import logging
import os
from pathlib import Path

from lorad.daemon.context import Context, spec_of
from lorad.errors import Conflict, StorageError
from lorad.files import fsync, write_whole
from lorad.spec.model import to_json
from lorad.store import runs
from lorad.store.rename import refuse_name
from lorad.store.rename import rename as rename_rows
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")


def rename(ctx: Context, old: str, new: str, by: str) -> RunRow:
    """Rename a run that is not at work, with its directory.

    Raises NotFound, SpecError, StorageError, and Conflict where something still uses it by its old name, such
    as a request or a logger: see also `lorad/store/rename.py`.
    """
    run = runs.get(ctx.store, old)
    refuse_name(ctx.store, old, new)
    if run.serving:
        hint = f"`lorad serve --stop {run.name}` first."
        raise Conflict(f"run {run.name} keeps a pool of its base up", hint=hint)
    if in_hand := sorted(name for name in ctx.serving.in_hand if name.startswith(f"{run.name}@")):
        raise Conflict(f"{in_hand[0]} answers a request", hint="Try again when it no longer does.")
    if run.name in (ctx.services.followed or {}):
        hint = "Try again when they are; `lorad doctor` says what keeps a logger from it."
        raise Conflict(f"figures of run {run.name} are still to be written to its loggers", hint=hint)
    place = run.dir.root.with_name(new)
    if os.path.lexists(place) and place.name.lower() != run.dir.root.name.lower():
        raise Conflict(f"{place} is there already", hint="Choose another name, or move it away.")
    rename_rows(ctx.store, old, new, directory=str(place), by=by)
    try:
        _move(ctx, new)
    except OSError as error:
        rename_rows(ctx.store, new, old, directory=run.directory, by=by)
        with contextlib.suppress(OSError):
            write_whole(run.dir.spec, to_json(spec_of(run)))
        hint = "The run has its old name again."
        raise StorageError(f"{run.directory} cannot be renamed: {error.strerror}", hint=hint) from error
    # from here on, what this daemon remembers has the new name
    ctx.storage.unpruned.discard(old)
    ctx.storage.unkept.pop(old, None)
    ctx.storage.last_words.pop(old, None)
    ctx.storage.unpruned.add(new)
    if old in ctx.queue.not_before:
        ctx.queue.not_before[new] = ctx.queue.not_before.pop(old)
    ctx.tail.forget()
    return runs.get(ctx.store, new)


def _move(ctx: Context, name: str) -> None:
    """Give the directory of a run the run's name. Where that raises OSError, it has its old name."""
    run = runs.get(ctx.store, name)
    place = run.dir.root.with_name(name)
    write_whole(run.dir.spec, to_json(spec_of(run)))
    os.rename(run.directory, place)
    fsync(place.parent)
    runs.set_fields(ctx.store, name, directory=str(place), spec=run.spec)


def finish_renames(ctx: Context) -> None:
    """Give directories the names of their runs where an earlier daemon ended before it did so."""
    for run in runs.every(ctx.store):
        directory = Path(run.directory)
        place = directory.with_name(run.name)
        if directory.name != run.name and directory.is_dir() and not os.path.lexists(place):
            _move(ctx, run.name)
            log.warning("run %s: its directory was still named %s", run.name, directory.name)
