"""Starting, adopting and signalling processes without a doubt."""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import AttemptDir
from lorad.daemon.process.processes import Processes, attempts_under, condemn, log_end, read_status

SLEEPER = [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(60)"]


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
    return value


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[AttemptDir]:
    directory = AttemptDir(tmp_path / "attempts" / "0001")
    yield directory
    Processes().kill_group(directory)


def started(attempt: AttemptDir, argv: list[str]) -> Processes:
    processes = Processes()
    processes.start(attempt, argv, {}, attempt.root)
    return processes


def alive(processes: Processes, attempt: AttemptDir) -> int:
    pid: int = wait_for(lambda: (s := processes.inspect(attempt)).phase == "alive" and s.pid)
    return pid


def test_a_process_is_starting_then_alive_then_exited(attempt: AttemptDir) -> None:
    processes = started(attempt, SLEEPER)
    assert processes.inspect(attempt).phase == "starting"
    alive(processes, attempt)
    assert processes.signal(attempt, signal.SIGTERM)
    state = wait_for(lambda: (s := processes.inspect(attempt)).phase == "exited" and s)
    assert (state.signal, state.in_words()) == (signal.SIGTERM, "was killed by SIGTERM")


@pytest.mark.parametrize("_", range(10))
def test_earliest_possible_signal_is_a_normal_end(attempt: AttemptDir, _: int) -> None:
    processes = started(attempt, SLEEPER)
    wait_for(attempt.status.exists)
    processes.signal(attempt, signal.SIGTERM)
    state = wait_for(lambda: not (s := processes.inspect(attempt)).is_up and s)
    assert (state.phase, state.signal) == ("exited", signal.SIGTERM)


def test_another_daemon_adopts_and_learns_the_exit_code(attempt: AttemptDir) -> None:
    started(attempt, [sys.executable, "-c", "import sys; sys.stdin.read(); raise SystemExit(37)"])
    state = wait_for(lambda: (s := Processes().inspect(attempt)).phase == "exited" and s)
    assert state.exit_code == 37


def test_process_outlives_its_shim_and_then_vanishes(attempt: AttemptDir) -> None:
    processes = started(attempt, SLEEPER)
    alive(processes, attempt)
    wait_for(lambda: b"on" in attempt.log.read_bytes())  # until then it waits for its shim
    os.kill((read_status(attempt) or {})["shim_pid"], signal.SIGKILL)
    assert processes.inspect(attempt).phase == "alive"
    assert processes.kill_group(attempt)
    wait_for(lambda: processes.inspect(attempt).phase == "vanished")


def test_a_reused_pid_is_never_touched(attempt: AttemptDir) -> None:
    attempt.root.mkdir(parents=True)
    bystander = os.getpid()
    status = {"shim_pid": bystander, "shim_start_time": 1, "pid": bystander, "start_time": 1, "boot_id": "x"}
    attempt.status.write_text(json.dumps(status | {"exit_code": None, "signal": None, "ended_at": None}))
    processes = Processes()
    assert processes.inspect(attempt).phase == "vanished"
    assert not processes.signal(attempt, signal.SIGKILL)
    assert not processes.kill_group(attempt)


def test_attempt_without_shim_is_absent_and_startable(attempt: AttemptDir) -> None:
    assert Processes().inspect(attempt).phase == "absent"
    alive(started(attempt, SLEEPER), attempt)


def test_nothing_ever_starts_in_a_condemned_directory(attempt: AttemptDir) -> None:
    condemn(attempt)
    processes = started(attempt, SLEEPER)
    wait_for(lambda: processes.inspect(attempt).phase == "vanished")
    assert not attempt.log.exists()


def test_condemning_a_living_process_changes_nothing(attempt: AttemptDir) -> None:
    processes = started(attempt, SLEEPER)
    alive(processes, attempt)
    condemn(attempt)
    assert processes.inspect(attempt).phase == "alive"


def test_daemons_starting_one_attempt_start_one_process(attempt: AttemptDir) -> None:
    all_of_them = [started(attempt, SLEEPER) for _ in range(4)]
    assert len({alive(processes, attempt) for processes in all_of_them}) == 1
    wait_for(lambda: log_end(attempt.log).endswith(": on"))


def test_watched_end_wakes_reader_once_written(attempt: AttemptDir) -> None:
    processes = started(attempt, [sys.executable, "-c", "raise SystemExit(3)"])
    fd = processes.watch(attempt)
    assert fd is not None
    assert select.select([fd], [], [], 60)[0] == [fd]
    os.close(fd)
    assert processes.inspect(attempt).exit_code == 3


def test_attempts_are_listed_oldest_first(tmp_path: Path) -> None:
    for name in ("0010", "0002", "notes"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert [attempt.root.name for attempt in attempts_under(tmp_path)] == ["0002", "0010"]


STEP = "step 6/16  reward 0.750  loss -0.0049"
CLOSED = "2026-11-27 06:49:16,182 INFO lorad.pool.host: pool tiny-1 is closed"
TRACE = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nmine.Odd: no such key'


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (f"{TRACE}\n\n{CLOSED}\n{STEP}\n", "its log ends: mine.Odd: no such key"),
        (f"{STEP}\nValueError: 3\n  it is odd\n", "its log ends: ValueError: 3"),
        ("ValueError: 3\nx WARNING a: an error that can be borne: no\n", "its log ends: ValueError: 3"),
        (f"{CLOSED}\n{STEP}\n", f"it left no error, and its last line was: {STEP}"),
        ("checkpoint at step 6: /x\n", "it left no error, and its last line was: checkpoint at step 6: /x"),
        ("\n", ""),
    ],
)
def test_cause_in_a_log_is_an_error(log: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert log_end(path) == says


def test_longer_cause_has_lines_before_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"here\n{CLOSED}\nCUDA error: 3\n{STEP}\n")
    assert log_end(path, 3) == "its log ends:\nhere\nCUDA error: 3"
