"""Compare the rows with the disk, to find files that are needed and missing, and files that no row names.

Only names are looked at; `lorad verify` reads the bytes.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lorad.adapters.directory import TEMPORARY
from lorad.box.paths import Home, RunDir
from lorad.daemon.record.relocate import correct_place
from lorad.daemon.storage.prune import REMOVED, VERSION, key_of, listed
from lorad.records.daemon import Census, Finding
from lorad.states import RunState
from lorad.store import runs
from lorad.store.check import CheckReport, check
from lorad.store.checkpoints import ever_made, not_deleted
from lorad.store.db import Reader, Rows
from lorad.store.rows import RunRow
from lorad.store.versions import held_versions, numbers
from lorad.text import counted

_MOST = 20  # findings of a kind that are listed one by one
_REPAIR = "`lorad doctor --repair` rebuilds the database from the journals and keeps this one."


def take_census(home: Home, runs_root: Path) -> Census:
    """Take the census of a home on a connection of its own. Unreadable files are problems, not errors."""
    if not home.database.exists():
        was_used = home.journal.exists() and home.journal.stat().st_size
        return Census([f"{home.database} is gone"] if was_used else [], [], [], [])
    report: CheckReport = check(home.database)
    if report.problems:
        return Census(report.problems, report.warnings, [], [])
    with contextlib.closing(Reader(home.database)) as reader, reader.at_once():
        rows = {row.name: row for row in runs.every(reader)}
        missing = [*_missing(reader, rows, runs_root)]
        unknown = [*_unknown(reader, rows, runs_root)]
    for path in listed(home.pools):
        if path.is_dir() and not (path / "pool.json").exists():
            finding = f"{path} is the directory of no pool"
            unknown.append(Finding(finding, "Delete it once nothing works there."))
    for findings in (missing, unknown):
        if (more := len(findings) - _MOST) > 0:
            findings[_MOST:] = [Finding(f"{more} more", "Mend these first.")]
    return Census(report.problems, report.warnings, missing, unknown, len(rows))


def _missing(reader: Rows, rows: dict[str, RunRow], runs_root: Path) -> Iterator[Finding]:
    """Find directories of runs that are gone, and in the others checkpoints and pinned or served versions,
    except an active run's newest, which a pool may be writing.
    """
    gone = {name: run for name, run in rows.items() if not Path(run.directory).is_dir()}
    moved = {name for name, run in gone.items() if correct_place(run, runs_root)}
    if moved:
        missing = f"the files of {counted(len(moved), 'run')} were moved to {runs_root}"
        yield Finding(missing, "`lorad daemon start` continues with them there; stop a running daemon first.")
    for name in (name for name in gone if name not in moved):
        finding = f"run {name}: its directory {gone[name].directory} is missing"
        advice = f"Put it back, there or into {runs_root}, and restart the daemon; `lorad rm {name}`"
        yield Finding(finding, f"{advice} forgets the run.")
    for version in held_versions(reader):
        run = rows[version.run]
        name = f"{version.run}@{version.version}"
        is_coming = RunState(run.state).is_active and run.version == version.version
        if version.run in gone or Path(version.path).is_dir() or is_coming:
            continue
        how = "pinned"
        advice = f"`lorad unpin {name}` lets it go."
        if version.aliases:
            how = f"served as {version.aliases[0]}"
            advice = f"`lorad swap {version.aliases[0]} RUN@N` serves another one."
        yield Finding(f"{name} is {how}, and its files {version.path} are missing", advice)
    for row in not_deleted(reader, lineage=True):
        if row.run not in gone and not Path(row.path).is_dir():
            missing = f"the checkpoint of run {row.run} at step {row.step} is missing: {row.path}"
            yield Finding(missing, f"`lorad resume {row.run} --from STEP` continues from another one.")


def _unknown(reader: Rows, rows: dict[str, RunRow], runs_root: Path) -> Iterator[Finding]:
    """Find directories of no run, and files that the journals of runs that are over do not record."""
    for path in listed(runs_root):
        if path.name not in rows and path.is_dir() and not path.name.startswith((REMOVED, TEMPORARY)):
            advice = f"If it was a run of this home, {_REPAIR} Else move it away, or delete it."
            yield Finding(f"no run of the database has its files in {path}", advice)
    recorded = ever_made(reader)
    versions = numbers(reader)
    advice = "A writer died before it said so; delete it, it is used by nothing."
    for name, run in rows.items():
        if not RunState(run.state).is_over:
            continue
        directory = RunDir(Path(run.directory))
        for path in listed(directory.checkpoints):
            if (key := key_of(path)) and (name, *key) not in recorded:
                yield Finding(f"{path} is no checkpoint that the journal of run {name} records", advice)
        for path in listed(directory.versions):
            if VERSION.fullmatch(path.name) and (name, int(path.name)) not in versions:
                yield Finding(f"{path} is no version that the journal of run {name} records", advice)
