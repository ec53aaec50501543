"""Checks for `lorad doctor`: the database is sound, its files are there, and no process outlived its run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

from lorad.box.paths import Home
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.output import size
from lorad.client.client import Client
from lorad.errors import Conflict, DaemonUnreachable, IntegrityError, LoradError
from lorad.records.daemon import Census, Orphan, Repaired
from lorad.text import counted

_REPAIR = (
    "`lorad daemon stop`, then `lorad doctor --repair` rebuilds it from the journals; "
    "runs continue meanwhile."
)
_T = TypeVar("_T")
_Orphans = dict[Literal["orphans"], list[Orphan]]  # what the daemon's code prints
_SHOWN = 8  # orphans that are named
_HINT = (
    "Nothing needs them: `kill PID` ends one, `lorad daemon stop` and `lorad doctor --repair` all; runs "
    "continue meanwhile, and the memory and devices that orphans hold become free."
)


def database_checks(home: Home) -> Iterator[InterpreterFinding]:
    """Check the database and its files. Without a daemon the files are looked at as they are."""
    if not (home.database.exists() or home.journal.exists()):
        return
    try:
        report = Client(home).database()
    except DaemonUnreachable:
        report = _without_daemon(home, "--check", Census)
    except LoradError:  # a shared daemon answers only its admins
        return
    bytes_ = home.database.stat().st_size if home.database.exists() else 0
    faults = "; ".join([size(bytes_), *report.problems, *report.warnings])
    yield InterpreterFinding("database", not report.problems, faults, _REPAIR)
    others = [f"{finding.what}: {finding.advice}" for finding in report.unknown]
    fine = f"{counted(report.runs, 'run')}: everything the database lists is on disk"
    lacking = [finding.what for finding in report.missing]
    advice = "\n".join(dict.fromkeys(finding.advice for finding in report.missing))
    yield InterpreterFinding("files", not lacking, "; ".join([*(lacking or [fine]), *others]), advice)


def repair(home: Home) -> Repaired:
    """Rebuild the database. Raises Conflict while a daemon has it open."""
    try:
        pid = Client(home).status().pid
    except DaemonUnreachable:
        return _without_daemon(home, "--repair", Repaired)
    hint = "`lorad daemon stop` ends it, and runs continue; `lorad daemon start` afterwards takes them over."
    raise Conflict(f"the daemon (pid {pid}) works with the database", hint=hint)


def _without_daemon(home: Home, what: str, kind: type[_T]) -> _T:
    """Run the daemon's own code on a home that has no daemon. Raises IntegrityError."""
    environment = os.environ | {"LORAD_HOME": str(home.root)}
    command = [sys.executable, "-m", "lorad.daemon", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().removeprefix("lorad: ") or f"it ended with code {done.returncode}"
        raise IntegrityError(why, hint="Nothing was changed.")
    return msgspec.json.decode(done.stdout, type=kind)


def orphan_checks(home: Home) -> Iterator[InterpreterFinding]:
    """Check for orphans, here where there is no daemon. A shared daemon shows them to its admins only."""
    try:
        orphans = Client(home).orphans()
    except DaemonUnreachable:
        orphans = _without_daemon(home, "--orphans", _Orphans)["orphans"]
    except LoradError:
        return
    shown = [orphan_in_words(orphan) for orphan in orphans[:_SHOWN]]
    more = [f"and {len(orphans) - _SHOWN} more"] if len(orphans) > _SHOWN else []
    detail = "none" if not orphans else "outlived their run or pool: " + "; ".join([*shown, *more])
    yield InterpreterFinding("orphans", not orphans, detail, _HINT, {"orphans": msgspec.to_builtins(orphans)})


def end_orphans(home: Home) -> list[Orphan]:
    """End all orphans of a home that has no daemon, and return them."""
    return _without_daemon(home, "--end-orphans", _Orphans)["orphans"]


def orphan_in_words(orphan: Orphan) -> str:
    return f"pid {orphan.pid} of {orphan.user}: {orphan.command}"
