"""What must hold when all runs of a round are complete, and when everything has been asked to end."""

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.kill9.box import Box
from faults.kill9.runs import Crew
from faults.kill9.witness import Witness
from lorad.daemon.record.audit import audit
from lorad.errors import LoradError

END_SECONDS = 20.0  # for everything of a home to end when it was asked to
ELSEWHERE = ("disk",)  # what the doctor may find that is not of this home's making


def exceptions(box: Box, crew: Crew, witness: Witness, expected: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for everything that does not hold."""
    until_up(box)
    for name, kind in crew.names.items():
        witness.hear(name)
        box.last[name] = run = box.client.show(name)
        if run.reason != "completed":
            yield f"{name} is {run.state}: {run.reason}: {run.detail}"
        got = box.facts(name)
        yield from (
            f"{name}: {key} differ from undisturbed" for key in got if got[key] != expected[kind][key]
        )
        yield from (f"{name}: audit: {wrong}" for wrong in audit(Path(run.directory)))
        checks = box.client.verify(name).checks
        yield from (f"{name}: verify: {wrong}" for check in checks for wrong in check.problems)
    yield from witness.lost()
    yield from database(box.home.database)
    yield from doctor(box)
    yield from (f"{attempt} began {count} times" for attempt, count in box.starts() if count > 1)


def until_up(box: Box) -> None:
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            box.client.status()
            return
        except LoradError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def database(path: Path) -> Iterator[str]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        yield from (row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok")
        yield from (f"foreign key: {row}" for row in connection.execute("PRAGMA foreign_key_check"))


def doctor(box: Box) -> Iterator[str]:
    command = [sys.executable, "-m", "lorad", "doctor", "--json"]
    done = subprocess.run(command, env=box.env, capture_output=True, text=True, timeout=120, check=False)
    try:
        findings = json.loads(done.stdout)
    except ValueError:
        yield f"lorad doctor exited {done.returncode}: {done.stderr}"
        return
    for found in findings:
        if not found["ok"] and found["name"] not in ELSEWHERE:
            yield f"lorad doctor: {found['name']}: {found['detail']}"


def is_empty(box: Box) -> Iterator[str]:
    """Everything ends when it is asked to, and nothing is left."""
    with contextlib.suppress(LoradError):
        for pool in box.client.pools():
            box.client.stop_pool(pool.pool)
    deadline = time.monotonic() + END_SECONDS
    while any(p.role in ("pool", "pool-shim") for p in box.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        box.client.shutdown(gateway=True)
    except LoradError as error:
        yield f"the daemon cannot be asked to end: {error}"
    while (left := box.processes()) and time.monotonic() < deadline + END_SECONDS:
        time.sleep(0.05)
    yield from (f"left behind: {process}" for process in left)
