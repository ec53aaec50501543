"""Checks for `lorad doctor` that the database is sound and that the files it lists are on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from lorad.box.paths import Home
from lorad.cli.output import size
from lorad.client.box_shapes import Census
from lorad.client.client import Client
from lorad.errors import Conflict, DaemonUnreachable, IntegrityError, LoradError

Found = tuple[str, bool, str, str]
REPAIR = (
    "`lorad daemon stop`, then `lorad doctor --repair` rebuilds it from the journals; "
    "runs continue meanwhile."
)


def database_checks(home: Home) -> Iterator[Found]:
    """Name, ok, detail, hint. Without a daemon the files are looked at as they are."""
    if not (home.database.exists() or home.journal.exists()):
        return
    try:
        report = Client(home).database()
    except DaemonUnreachable:
        report = msgspec.convert(told(home, "--check"), Census)
    except LoradError:  # a shared daemon answers only its admins
        return
    bytes_ = home.database.stat().st_size if home.database.exists() else 0
    yield (
        "database",
        not report.problems,
        "; ".join([size(bytes_), *report.problems, *report.warnings]),
        REPAIR,
    )
    missing, unknown = report.missing, report.unknown
    others = [f"{finding.what}: {finding.advice}" for finding in unknown]
    fine = f"{report.runs} run{'' if report.runs == 1 else 's'}: everything the database lists is on disk"
    lacking = [finding.what for finding in missing]
    advice = "\n".join(dict.fromkeys(finding.advice for finding in missing))
    yield "files", not missing, "; ".join([*(lacking or [fine]), *others]), advice


def repair(home: Home) -> dict[str, Any]:
    """Rebuild the database and return what was done. Raises Conflict while a daemon has it open."""
    try:
        pid = Client(home).status().pid
    except DaemonUnreachable:
        return told(home, "--repair")
    hint = "`lorad daemon stop` ends it, and runs continue; `lorad daemon start` afterwards takes them over."
    raise Conflict(f"the daemon (pid {pid}) works with the database", hint=hint)


def told(home: Home, what: str) -> dict[str, Any]:
    """Run the daemon's own code on a home that has no daemon, and return what it says.

    Raises IntegrityError.
    """
    environment = os.environ | {"LORAD_HOME": str(home.root)}
    command = [sys.executable, "-m", "lorad.daemon", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().removeprefix("lorad: ") or f"it ended with code {done.returncode}"
        raise IntegrityError(why, hint="Nothing was changed.")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
