"""`lorad job`: one process for a scheduler; all that it started ends with it, and it resumes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.system

SPEC = """
name: job
model: {path: builtin:tiny}
algorithm: {group_size: 2}
data: {train: sort, prompts_per_step: 2}
rollout: {max_new_tokens: 4}
reward: exact_match
eval: {every: 0}
checkpoint: {every: 2}
trainer: {steps: 40000}
"""
COMMAND = [sys.executable, "-m", "lorad", "job"]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def begun(spec: Path, *more: str) -> subprocess.Popen[str]:
    """A job, in a session of its own, as a scheduler starts it."""
    return subprocess.Popen(
        [*COMMAND, str(spec), *more], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """What it says up to a line with `word`."""
    assert process.stderr
    said = ""
    for line in process.stderr:
        said += line
        if word in line:
            return said
    raise AssertionError(f"it ended before {word!r}: {said}")


def of_home(home: Path) -> list[str]:
    """Command lines of the processes that belong to the home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LORAD_HOME") == str(home) and process.pid != os.getpid():
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_job_ends_with_its_run(spec: Path, home: Path) -> None:
    with begun(spec, "trainer.steps=2") as job:
        said = read_until(job, "ended (completed) at step 2")
        assert "job starts in" in said and job.wait(30) == 0
    assert of_home(home) == []


def test_a_paused_and_killed_job_is_resumed(spec: Path, home: Path) -> None:
    """By the same command; neither leaves anything."""
    with begun(spec) as job:
        read_until(job, "step 3/")
        os.killpg(job.pid, signal.SIGKILL)
    until(lambda: of_home(home) == [])
    with begun(spec, "trainer.steps=6") as job:
        assert "trainer.steps is 6 in" in read_until(job, "job is resumed")
        read_until(job, "step ")
        job.send_signal(signal.SIGTERM)
        assert "job is paused at step" in read_until(job, "resumes it") and job.wait(30) == 143
    assert of_home(home) == []
    with begun(spec) as job:
        read_until(job, "job is resumed")
        os.killpg(job.pid, signal.SIGKILL)
    until(lambda: of_home(home) == [])


@pytest.mark.long
def test_sigterm_to_the_whole_tree_pauses(spec: Path, home: Path) -> None:
    """As `ray job stop` sends it, to each process of the tree at once."""
    with begun(spec) as job:
        read_until(job, "step 3/")
        tree = psutil.Process(job.pid)
        for process in [tree, *tree.children(recursive=True)]:
            process.terminate()
        assert "job is paused at step" in read_until(job, "resumes it") and job.wait(30) == 143
    assert of_home(home) == []


def test_sigterm_while_it_starts_is_no_crash(spec: Path, home: Path) -> None:
    with begun(spec) as job:
        until(lambda: any("lorad.daemon" in command for command in of_home(home)))
        job.send_signal(signal.SIGTERM)
        said = job.communicate(timeout=30)[1]
    assert job.returncode == 143 and "Traceback" not in said
    until(lambda: of_home(home) == [])


def test_a_home_with_a_daemon_is_refused(spec: Path, home: Path) -> None:
    subprocess.run([sys.executable, "-m", "lorad", "daemon", "start"], check=True, capture_output=True)
    done = subprocess.run([*COMMAND, str(spec)], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and f"a daemon works in {home} already" in done.stderr
