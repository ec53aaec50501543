"""What an earlier daemon did not finish: runs that were being removed or made."""

import json
import logging
from pathlib import Path

from lorad.adapters.directory import TEMPORARY, discard
from lorad.daemon.context import Context
from lorad.daemon.storage.prune import REMOVED
from lorad.files import remove_tree
from lorad.store import runs

log = logging.getLogger("lorad.daemon")


def sweep_removed(ctx: Context) -> None:
    """Delete the files of runs that an earlier daemon removed, and put back those whose rows still exist."""
    for doomed in ctx.runs_root.glob(f"{REMOVED}*"):
        name = doomed.name.removeprefix(REMOVED).rpartition("-")[0]
        run = runs.find(ctx.store, name)
        if run and Path(run.directory).parent == doomed.parent and not Path(run.directory).exists():
            doomed.rename(run.directory)
        else:
            remove_tree(doomed)


def sweep_half_made(ctx: Context) -> None:
    """Delete directories of runs whose making an earlier daemon did not survive. Only what a run is asked for
    with is in them, and the daemon's journal does not name the run, as if an older database lacked it.
    """
    files = ("spec.yaml", "spec.json", "request.json")
    of_request = {*files, *(f".{name}.tmp" for name in files), "origin", "reference"}
    names = {*runs.names(ctx.store)}
    half_made = []
    for path in ctx.runs_root.iterdir():
        is_other = path.name in names or path.name.startswith((REMOVED, TEMPORARY)) or path.is_symlink()
        present = {entry.name for entry in path.iterdir()} if not is_other and path.is_dir() else set()
        if present and present <= of_request:
            half_made.append(path)
    journal = ctx.home.journal.read_bytes() if half_made and ctx.home.journal.exists() else b""
    for path in half_made:
        if f'"run":{json.dumps(path.name)}'.encode() not in journal:
            log.warning("run %s: it was never made whole, and its directory is deleted", path.name)
            discard(path)
