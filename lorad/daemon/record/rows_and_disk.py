"""The rows against the disk, both ways: what something needs and is not there, and what nobody knows. Looks
at names only; `lorad verify` reads the bytes."""

from collections.abc import Iterator
from pathlib import Path

from lorad.adapters.directory import TEMPORARY
from lorad.box.paths import Home, RunDir
from lorad.daemon.record.relocate import corrected, place_of
from lorad.daemon.storage.prune import REMOVED, VERSION, key_of, listed
from lorad.records.daemon import Census, Finding
from lorad.states import RunState
from lorad.store import runs
from lorad.store.check import CheckReport, check
from lorad.store.checkpoints import ever_made, not_deleted
from lorad.store.db import Reader, Rows
from lorad.store.rows import RunRow
from lorad.store.versions import held_versions, numbers

_MOST = 20  # findings of a kind that are listed one by one
_REPAIR = "`lorad doctor --repair` rebuilds the database from the journals and keeps this one."


def of_home(home: Home, runs_root: Path) -> Census:
    """Take the census of a home on a connection of its own.

    What cannot be read is a problem, not an error.
    """
    if not home.database.exists():
        problem = f"{home.database} is gone" if home.journal.exists() and home.journal.stat().st_size else ""
        return Census([problem] if problem else [], [], [], [])
    report: CheckReport = check(home.database)
    if report.problems:
        return Census(report.problems, report.warnings, [], [])
    reader = Reader(home.database)
    try:
        with reader.at_once():
            rows = {row.name: row for row in runs.every(reader)}
            missing = [*_missing_directories(rows, runs_root), *_missing_versions(reader, rows)]
            for row in not_deleted(reader, lineage=True):
                if _is_there(rows[row.run]) and not Path(row.path).is_dir():
                    what = f"the checkpoint of run {row.run} at step {row.step} is missing: {row.path}"
                    advice = f"`lorad resume {row.run} --from STEP` continues from another one."
                    missing.append(Finding(what, advice))
            unknown = [*_unknown_runs(runs_root, rows), *_unknown_files(reader, rows)]
            for path in listed(home.pools):
                if path.is_dir() and not (path / "pool.json").exists():
                    what = f"{path} is the directory of no pool"
                    unknown.append(Finding(what, "Delete it once nothing works there."))
    finally:
        reader.close()
    return Census(report.problems, report.warnings, _bounded(missing), _bounded(unknown), len(rows))


def _bounded(findings: list[Finding]) -> list[Finding]:
    more = len(findings) - _MOST
    return [*findings[:_MOST], Finding(f"{more} more", "Mend these first.")] if more > 0 else findings


def _is_there(run: RunRow) -> bool:
    return Path(run.directory).is_dir()


def _missing_directories(rows: dict[str, RunRow], runs_root: Path) -> Iterator[Finding]:
    gone = [run for run in rows.values() if not _is_there(run)]
    moved = {run.name for run in gone if corrected(place_of(run), runs_root)}
    if moved:
        what = f"the files of {len(moved)} run{'' if len(moved) == 1 else 's'} were moved to {runs_root}"
        yield Finding(what, "`lorad daemon start` continues with them there; stop a running daemon first.")
    for run in gone:
        if run.name not in moved:
            advice = f"Put it back, there or into {runs_root}, and restart the daemon; `lorad rm {run.name}`"
            advice += " forgets the run."
            yield Finding(f"run {run.name}: its directory {run.directory} is missing", advice)


def _missing_versions(reader: Rows, rows: dict[str, RunRow]) -> Iterator[Finding]:
    """Find pinned or served versions without files, except an active run's newest, which a pool may be
    writing.
    """
    for version in held_versions(reader):
        run = rows[version.run]
        name = f"{version.run}@{version.version}"
        is_coming = RunState(run.state).is_active and run.version == version.version
        if not _is_there(run) or Path(version.path).is_dir() or is_coming:
            continue
        alias = next(iter(version.aliases), None)
        how = f"served as {alias}" if alias else "pinned"
        instead = (
            f"`lorad swap {alias} RUN@N` serves another one" if alias else f"`lorad unpin {name}` lets it go"
        )
        yield Finding(f"{name} is {how}, and its files {version.path} are missing", f"{instead}.")


def _unknown_runs(runs_root: Path, rows: dict[str, RunRow]) -> Iterator[Finding]:
    for path in listed(runs_root):
        if path.name not in rows and path.is_dir() and not path.name.startswith((REMOVED, TEMPORARY)):
            advice = (
                f"If it was a run of this home, {_REPAIR[0].lower()}{_REPAIR[1:]} Else move it away, or "
                "delete it."
            )
            yield Finding(f"no run of the database has its files in {path}", advice)


def _unknown_files(reader: Rows, rows: dict[str, RunRow]) -> Iterator[Finding]:
    """Find files without a row, of runs that are over: what an active run writes may not be ingested yet."""
    made_ones = ever_made(reader)
    versions = numbers(reader)
    for name, run in rows.items():
        if not RunState(run.state).is_over:
            continue
        directory = RunDir(Path(run.directory))
        for path in listed(directory.checkpoints):
            if (key := key_of(path)) and (name, *key) not in made_ones:
                yield _unknown(name, path, "checkpoint")
        for path in listed(directory.versions):
            if VERSION.fullmatch(path.name) and (name, int(path.name)) not in versions:
                yield _unknown(name, path, "version")


def _unknown(run: str, path: Path, kind: str) -> Finding:
    what = f"{path} is no {kind} that the journal of run {run} records"
    return Finding(what, "A writer died before it said so; delete it, it is used by nothing.")
