"""Exact points that `make kill9` strikes at, each by itself: what a daemon makes of a process whose shim died
there.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.box.paths import AttemptDir
from lorad.daemon.process import processes, shim
from lorad.daemon.process.processes import Processes, ProcessState, condemn, read_status
from lorad.daemon.runs.settle import was_killed
from tests.kit.world import REPOSITORY

pytestmark = pytest.mark.system

SHIM = REPOSITORY / "faults" / "kill9" / "probe" / "shim.py"
PROGRAM = "open('began', 'a').write('x'); import time; time.sleep(60)"
BEFORE = ("before the fork", "between fork and status", "before the status", "between status and program")


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptDir]:
    monkeypatch.setattr(processes, "SHIM", [*processes.SHIM[:-1], str(SHIM)])
    monkeypatch.setenv("KILL9_ROOT", str(tmp_path))
    directory = AttemptDir(tmp_path / "runs" / "a" / "attempts" / "0001")
    yield directory
    Processes().kill_group(directory)


def shim_killed(attempt: AttemptDir, point: str) -> Processes:
    """A daemon whose shim died at `point`."""
    root = Path(os.environ["KILL9_ROOT"])
    (root / "trap.json").write_text(json.dumps({"role": "driver-shim", "point": point}))
    daemon = start(Processes(), attempt)
    for _ in range(2000):
        if (root / "sprung.json").exists() and daemon.inspect(attempt).phase != "starting":
            return daemon
        time.sleep(0.005)
    raise AssertionError("the trap did not spring")


def start(daemon: Processes, attempt: AttemptDir) -> Processes:
    daemon.start(attempt, [sys.executable, "-c", PROGRAM], {}, attempt.root)
    return daemon


def settled(daemon: Processes, attempt: AttemptDir) -> ProcessState:
    """What it came to, once that is no more `starting` or `alive`."""
    for _ in range(2000):
        if not (state := daemon.inspect(attempt)).is_up:
            return state
        time.sleep(0.005)
    raise AssertionError(f"it is {state}")


@pytest.mark.parametrize("point", BEFORE)
def test_killed_shims_attempt_begins_at_most_once(attempt: AttemptDir, point: str) -> None:
    shim_killed(attempt, point)
    second = start(Processes(), attempt)  # a daemon that knows nothing of the first
    for _ in range(100):
        second.inspect(attempt)
        time.sleep(0.002)
    began = attempt.root / "began"
    assert len(began.read_text() if began.exists() else "") <= 1


@pytest.mark.parametrize("point", BEFORE)
def test_daemon_knows_its_killed_shim_began_nothing(attempt: AttemptDir, point: str) -> None:
    daemon = shim_killed(attempt, point)
    state = settled(daemon, attempt)
    assert (state.phase, state.exit_code) == ("vanished", None)
    assert not (attempt.root / "began").exists()


def test_unwritten_end_is_vanished_rather_than_exited(attempt: AttemptDir) -> None:
    root = Path(os.environ["KILL9_ROOT"])
    daemon = start(Processes(), attempt)
    while not (attempt.root / "began").exists():
        time.sleep(0.005)
    (root / "trap.json").write_text(json.dumps({"role": "driver-shim", "point": "between end and status"}))
    daemon.signal(attempt, signal.SIGKILL)
    assert settled(daemon, attempt).phase == "vanished"
    assert (read_status(attempt) or {})["ended_at"] is None


def test_pool_killed_with_its_shim_did_not_fail(attempt: AttemptDir) -> None:
    assert was_killed(ProcessState("vanished", 7))
    assert was_killed(ProcessState("exited", 7, signal=9))
    assert not was_killed(ProcessState("exited", 7, exit_code=1))
    condemn(attempt)
    assert not was_killed(Processes().inspect(attempt))  # it never began: its device is taken, say


def test_late_shim_of_an_earlier_daemon_begins_nothing(attempt: AttemptDir) -> None:
    sprung = Path(os.environ["KILL9_ROOT"], "sprung.json")
    sprung.write_text(json.dumps({"point": "spawned"}))  # its daemon was killed just now: it is late
    first = start(Processes(), attempt)
    time.sleep(0.5)
    sprung.unlink()
    second = Processes()
    assert second.inspect(attempt).phase == "absent"
    start(second, attempt)
    assert refused(first._shims[attempt.root], second._shims[attempt.root]) in (shim.EX_LOCKED, shim.EX_USED)
    assert (attempt.root / "began").read_text() == "x"


def refused(*shims: int) -> int:
    """The exit code of the first that ends."""
    for _ in range(2000):
        for pid in shims:
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.005)
    raise AssertionError("both shims live")
