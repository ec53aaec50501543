"""Processes that outlive their attempt are found, reported and ended; no others are."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.box.paths import AttemptDir, Home
from lorad.daemon.process.orphans import end_orphans, find_orphans
from lorad.daemon.process.processes import Processes, read_status
from tests.daemon.process.test_processes import alive, started, wait_for
from tests.kit.world import world

AWAY = "import os, subprocess, sys, time; " + (
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, "
    "{}); print(p.pid, flush=True); time.sleep({})"
)


@pytest.fixture
def attempt(home: Path) -> Iterator[AttemptDir]:
    directory = AttemptDir(home / "runs" / "a" / "attempts" / "0001")
    yield directory
    Processes().kill_group(directory)
    for orphan in find_orphans(Home(home), settled=-1):
        with contextlib.suppress(ProcessLookupError):  # it was killed just now, and is gone
            os.kill(orphan.pid, 9)


def leaver(attempt: AttemptDir, seconds: float = 0.0, options: str = "") -> int:
    """The pid of what a process starts in a session of its own, before it ends after `seconds`."""
    started(attempt, [sys.executable, "-c", AWAY.format(options, seconds)])
    return int(wait_for(lambda: attempt.log.exists() and attempt.log.read_text()))


def pids(home: Path, settled: float = 0.0) -> list[int]:
    return [orphan.pid for orphan in find_orphans(Home(home), settled)]


def test_what_outlives_its_attempt_is_an_orphan(home: Path, attempt: AttemptDir) -> None:
    pid = leaver(attempt)
    wait_for(lambda: pids(home) == [pid])
    (told,) = find_orphans(Home(home), settled=0.0)
    assert told.attempt == str(attempt.root.resolve()) and "time.sleep(600)" in told.command and told.user


def test_nobody_is_an_orphan_while_the_attempt_lives(home: Path, attempt: AttemptDir) -> None:
    leaver(attempt, seconds=600)
    assert pids(home, settled=-1) == []


def test_what_may_still_be_ending_is_not_told(home: Path, attempt: AttemptDir) -> None:
    leaver(attempt)
    wait_for(lambda: (read_status(attempt) or {})["ended_at"])
    assert pids(home, settled=60.0) == []


def test_end_by_a_clock_ahead_hides_no_orphan(home: Path, attempt: AttemptDir) -> None:
    pid = leaver(attempt)
    wait_for(lambda: (read_status(attempt) or {})["ended_at"])
    status = json.loads(attempt.status.read_bytes())
    attempt.status.write_text(json.dumps(status | {"ended_at": 1e10}))
    wait_for(lambda: pids(home) == [pid])


def test_process_without_its_directory_is_an_orphan(home: Path, attempt: AttemptDir) -> None:
    pid = leaver(attempt)
    wait_for(lambda: (read_status(attempt) or {})["ended_at"])
    shutil.rmtree(attempt.root)
    wait_for(lambda: pids(home, settled=60.0) == [pid])  # the shim needs a moment to go


def test_process_of_superseded_attempt_is_an_orphan(home: Path, attempt: AttemptDir) -> None:
    pid = leaver(attempt, seconds=600)
    (attempt.root.parent / "0002").mkdir()
    assert set(pids(home)) == {pid, (read_status(attempt) or {})["pid"]}


def test_process_hiding_its_environment_is_found_by_log(home: Path, attempt: AttemptDir) -> None:
    pid = leaver(attempt, options="env={}")
    wait_for(lambda: pids(home) == [pid])


def test_processes_of_other_homes_are_not_looked_at(home: Path, attempt: AttemptDir, tmp_path: Path) -> None:
    leaver(attempt)
    wait_for(lambda: pids(home))
    assert find_orphans(Home(tmp_path), settled=-1) == []


def test_orphans_are_ended_and_nobody_else(home: Path, attempt: AttemptDir) -> None:
    beside = AttemptDir(home / "runs" / "b" / "attempts" / "0001")
    keeper = alive(started(beside, [sys.executable, "-c", "import time; time.sleep(600)"]), beside)
    pid = leaver(attempt)
    wait_for(lambda: pids(home))
    assert [ended.pid for ended in end_orphans(Home(home), settled=0.0)] == [pid]
    assert pids(home) == [] and Path(f"/proc/{keeper}").exists()
    Processes().kill_group(beside)


@pytest.mark.system
def test_doctor_finds_orphans_and_repair_ends_them() -> None:
    with world() as made:
        attempt = AttemptDir(made.home.run("gone").root / "attempts" / "0001")
        mark = {"LORAD_ATTEMPT": str(attempt.root)}
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | mark)
        try:
            checks = json.loads(made.lorad("doctor", "--json", expect=1).stdout)
            (found,) = (check for check in checks if check["name"] == "orphans")
            assert not found["ok"] and f"pid {left.pid} of " in found["detail"] and "kill" in found["hint"]
            made.lorad("daemon", "start")
            assert [orphan.pid for orphan in made.client.orphans()] == [left.pid]
            made.lorad("daemon", "stop")
            assert f"Ended: pid {left.pid} of " in made.lorad("doctor", "--repair").stdout
            assert left.wait(60) == -15
        finally:
            left.kill()
            left.wait()


def test_daemon_started_by_a_run_is_no_orphan() -> None:
    with world() as made:
        mark = str(made.home.run("a").root / "attempts" / "0001")
        made.lorad("daemon", "start", LORAD_ATTEMPT=mark)
        assert made.client.orphans() == []
        pid = made.client.status().pid
        assert b"LORAD_ATTEMPT" not in Path(f"/proc/{pid}/environ").read_bytes()
