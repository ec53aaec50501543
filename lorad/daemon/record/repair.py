"""Rebuild the database from the daemon's journal and the journals and directories of the runs.

The new one is built beside the old one, which is kept; one rename puts it in its place. Running processes
continue meanwhile: the next daemon finds them as it always does.
"""

import contextlib
import os
import time
from pathlib import Path

from msgspec import structs

from lorad.box import config
from lorad.box.paths import Home, RunDir
from lorad.daemon.home_lock import lock
from lorad.daemon.journal import ALL, JournalContent, read
from lorad.daemon.record import from_directories
from lorad.daemon.record.relocate import RunPlace, correct_place
from lorad.errors import Conflict, IntegrityError
from lorad.files import fsync
from lorad.records.daemon import Repaired
from lorad.store.check import check
from lorad.store.checkpoints import mark_deleted, not_deleted
from lorad.store.db import Store
from lorad.store.rebuild import Tables, rebuild

_PARTS = ("", "-wal", "-shm")
_NEW = ".repaired"
_STOP_FIRST = (
    "`lorad daemon stop` ends it, and runs continue; `lorad daemon start` afterwards takes them over."
)
_COUNTED = ("runs", "attempts", "steps", "versions", "checkpoints", "aliases", "sweeps", "events")


def repair(home: Home) -> Repaired:
    """Raises Conflict while the home has a daemon, SpecError, StorageError, IntegrityError."""
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)  # a shared daemon's home stays open to its users
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(home))
        except Conflict as error:
            raise Conflict(error.message, hint=_STOP_FIRST) from None
        _give(home, home.daemon_lock)
        journal_read = read(home.journal)
        runs_root = (config.load(home.config).storage or home.root) / "runs"
        tables, words = _facts_of(home, journal_read, runs_root)
        is_complete = not words
        fresh = home.database.with_name(home.database.name + _NEW)
        _discard(fresh)
        with contextlib.closing(Store(fresh)) as store:
            rows = tables.rows["runs"].items()
            journals = {name: RunDir(Path(run["directory"])).journal for (name,), run in rows}
            journals = {name: journal for name, journal in journals.items() if journal.exists()}
            newest = journal_read.changes[-1][1].number if journal_read.changes else 0
            # one less makes the next daemon write the whole database to the journal
            number = newest if is_complete else max(0, newest - 1)
            words += rebuild(store, tables, journals, number)
            if not is_complete:  # the journal does not say which checkpoints were deleted
                with store.write():
                    for row in not_deleted(store, lineage=False):
                        path = Path(row.path)
                        if path.parent.is_dir() and not path.is_dir():
                            mark_deleted(store, row.run, row.step, row.attempt)
            counts = {table: store.count(table) for table in _COUNTED}
        if problems := check(fresh).problems:
            hint = f"The old one stays; see {fresh}."
            raise IntegrityError(f"the new database is not whole: {problems[0]}", hint=hint)
        _give(home, fresh)
        return Repaired(str(home.database), _put_in_place(home.database, fresh), counts, words)


def _facts_of(home: Home, journal_read: JournalContent, runs_root: Path) -> tuple[Tables, list[str]]:
    """Collect what was in the database, and sentences about what the daemon's journal does not contain."""
    words = [f"line {number} of {home.journal} cannot be read" for number in journal_read.damaged]
    tables = Tables()
    is_complete = any(kind == ALL for kind, _ in journal_read.changes[:1])
    if not is_complete:
        words.append(f"{home.journal} is incomplete; the rest comes from the directories of the runs")
    for _, change in journal_read.changes:
        tables.apply(change)
    for (name,), row in tables.rows["runs"].items():
        if "directory" not in row:  # the line with its beginning is lost
            row |= from_directories.row_of(runs_root / name) | row
    for row in tables.rows["runs"].values():
        if place := correct_place(RunPlace(row["name"], row["directory"], row["spec"]), runs_root):
            row |= structs.asdict(place)
    words += from_directories.add_unknown(tables, runs_root)
    if not is_complete:
        words += from_directories.add_attempts(tables)
        from_directories.add_served(tables, home.gateway / "table.json")
    return tables, words


def _give(home: Home, path: Path) -> None:
    """Give a file to the owner of the home: root may repair the home of another user."""
    owner = home.root.stat()
    if owner.st_uid != os.geteuid():
        os.chown(path, owner.st_uid, owner.st_gid)


def _put_in_place(database: Path, fresh: Path) -> str | None:
    """Put the new database in place, and return where the old one is kept, if there was one. The old one goes
    first with its -wal: at no moment is there one with the -wal of the other.
    """
    fsync(fresh)
    kept = database.with_name(f"{database.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    present = [part for part in _PARTS if Path(f"{database}{part}").exists()]
    for part in present:
        Path(f"{database}{part}").rename(f"{kept}{part}")
    fsync(database.parent)
    fresh.rename(database)
    fsync(database.parent)
    _discard(fresh)
    return str(kept) if "" in present else None


def _discard(database: Path) -> None:
    for part in (*_PARTS, ".lock"):
        Path(f"{database}{part}").unlink(missing_ok=True)
