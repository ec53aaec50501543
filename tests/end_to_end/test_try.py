"""`lorad try`: samples of a spec before it is queued, without a daemon, and without anything left behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.kit.pool_kit import until
from tests.kit.world import REPOSITORY, World

SPEC = """
data: {train: lookup}
env: {name: "envs.py:Moody", turns: 3}
rollout: {max_new_tokens: 12}
"""
MOODY = """
import os
from lorad.envs.lookup import Lookup
from lorad.envs.protocol import Observation

class Moody(Lookup):
    '''Answers by the process that it is in, once the model has said something.'''
    def step(self, turn):
        return Observation(f"{os.getpid()}=" if turn.text else "?")
"""


def left(directory: Path) -> list[list[str]]:
    """Command lines of processes that belong to trials with their files in `directory`."""
    found = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    return [line for line in found if any(part.startswith(f"{directory}/lorad-try-") for part in line)]


def test_episodes_are_shown_and_played_again() -> None:
    made = World()
    tried: dict[str, Any] = made.json("try", made.spec(SPEC), "env.name=lookup", "-n", 3)
    assert len(tried["samples"]) == 3 and tried["differences"] == []
    for sample in tried["samples"]:
        assert sample["end"] in ("done", "length", "turns") and sample["turns"][0]["text"]
        assert sample["reward"] == sum(turn["reward"] for turn in sample["turns"])
    assert not made.home.socket.exists() and left(Path(tempfile.gettempdir())) == []


def test_moody_environment_is_found() -> None:
    made = World()
    (made.root / "envs.py").write_text(MOODY)
    told = made.lorad("try", made.spec(SPEC), "-n", 2, expect=1)
    assert "turn 1" in told.stdout and "recorded" in told.stdout and "played again: 2 differ" in told.stderr


def test_killed_trial_leaves_no_process(tmp_path: Path) -> None:
    made, place = World(), Path(tempfile.mkdtemp(prefix="try-", dir="/tmp"))
    command = [sys.executable, "-m", "lorad", "try", str(made.spec("data: {train: sort}")), "-n", "256"]
    environment = {"LORAD_HOME": str(made.home.root), "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(place)}
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    until(lambda: bool(left(place)))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not left(place))


def test_what_cannot_be_tried_is_refused() -> None:
    made = World()
    told = made.lorad("try", made.spec("data: {train: sort}"), "algorithm=sft", expect=2).stderr
    assert "algorithm: sft trains on completions in the data" in told
    told = made.lorad("try", made.spec(SPEC), expect=2).stderr
    assert "env.name" in told and "envs.py" in told
