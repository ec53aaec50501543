"""Correct the rows that name the old place of a home, or of its `storage`, that was moved without a daemon.

Only `runs.directory` and `lora.adapter_path` of a spec hold paths of the home; all others in the database are
relative to the run's directory.
"""

import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from lorad.box.paths import RunDir
from lorad.daemon.context import Context
from lorad.errors import IntegrityError
from lorad.files import open_file
from lorad.store import events, runs
from lorad.store.ingest import is_of_run
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")
_MOST = 1 << 20  # bytes of a first record that are compared


def relocate(ctx: Context) -> None:
    """Correct the rows of all runs whose directory lies under the present root and has the journal that the
    database has taken in, in one transaction that the daemon's journal records.
    """
    moved = []
    for run in runs.every(ctx.store):
        if (place := correct_place(run, ctx.runs_root)) is None:
            continue
        journal = RunDir(Path(place.directory)).journal
        try:
            is_known = is_of_run(ctx.store, run.name, journal)
            why = "its journal is not the one that the database knows"
        except (OSError, IntegrityError) as error:
            is_known = False
            why = str(error)
        if is_known:
            moved.append((run, place))
        else:
            log.error("run %s: %s is not taken for its directory: %s", run.name, place.directory, why)
    if not moved:
        return
    former = ", ".join(sorted({str(Path(run.directory).parent) for run, _ in moved}))
    with ctx.store.write():
        for run, place in moved:
            runs.set_fields(ctx.store, run.name, directory=place.directory, spec=place.spec)
        data = {"runs": len(moved), "from": former, "to": str(ctx.runs_root), "by": "daemon"}
        events.append(ctx.store, None, "moved", data)
    log.warning("the files of %d runs were moved from %s to %s", len(moved), former, ctx.runs_root)


class RunPlace(Struct, frozen=True):
    """Where the files of a run lie, and its spec as JSON, which may name such files."""

    name: str
    directory: str
    spec: str


def correct_place(run: RunPlace | RunRow, runs_root: Path) -> RunPlace | None:
    """Correct the place of a run whose files lie in `runs_root` though its row says elsewhere, and the
    `lora.adapter_path` of its spec if that is of a run of this home; None for any other run.

    Where the old directory still has a run in it, the new one must be a copy of it. A driver that had yet to
    see that its home was moved may have made the old one again, with neither a request nor a journal.
    """
    old = Path(run.directory)
    new = runs_root / run.name
    is_real = os.path.isdir(new) and not os.path.islink(new)  # no link that leads elsewhere
    if old == new or not is_real or new.name == ".." or not os.path.isfile(new / "request.json"):
        return None
    if any(os.path.exists(path) for path in (old / "request.json", RunDir(old).journal)):
        try:
            if old.samefile(new) or _beginning(RunDir(old)) != _beginning(RunDir(new)):
                return None
        except OSError:
            return None
    plain = msgspec.json.decode(run.spec)
    lora = plain.get("lora") or {}
    path = Path(lora.get("adapter_path") or "")
    if old.parent not in path.parents or ".." in path.parts:
        return RunPlace(run.name, str(new), run.spec)
    lora["adapter_path"] = str(runs_root / path.relative_to(old.parent))
    return RunPlace(run.name, str(new), msgspec.json.encode(plain).decode())


def _beginning(run: RunDir) -> bytes:
    """Read the first record, which says when it was written; the spec of a run that has not begun."""
    path = run.journal if run.journal.exists() else run.spec
    with open_file(path) as file:
        return file.readline(_MOST)
