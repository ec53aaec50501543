"""User code in a bubblewrap: what it cannot reach."""

import os
import shutil
import socket
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorad.driver.rewards import Rewarder, Score
from lorad.envs.host import EnvironmentHost
from lorad.errors import SpecError
from lorad.records.episodes import Task
from lorad.rl.reward import RewardInput
from lorad.spec.env import EnvSpec
from lorad.spec.reward import RewardSpec

CODE = """
import os, pathlib, socket, subprocess, sys

def network(answer): socket.create_connection(("127.0.0.1", int(answer)), 2); return 1

def look(answer):
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    return {"seen": float(os.path.exists(answer)), "processes": len(processes)}

def write(answer): pathlib.Path(answer).write_text("x"); return 1

def leave(answer):
    pathlib.Path("/tmp/here").write_text("x")
    subprocess.Popen(["sleep", answer], start_new_session=True)
    return 1
"""


LOOKS = """
import glob, os
from lorad.envs.protocol import Observation

def command(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # it has ended
        return ""

class Looks:
    def reset(self, row, seed):
        found = [command(path) for path in glob.glob("/proc/[0-9]*/cmdline")]
        return Observation(f"{os.path.exists(row['path'])} {row['command'] in found}")

    def step(self, turn):
        return Observation(None)

    def close(self):
        pass
"""


def works() -> bool:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(command, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not works(), reason="bubblewrap is not installed, or may not do it here")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (made := tmp_path / "mine").mkdir()
    (made / "score.py").write_text(CODE)
    yield made


def score(folder: Path, function: str, answer: str, python: str | None = None) -> Score:
    spec = RewardSpec(name=f"score.py:{function}", sandbox="bubblewrap", workers=1, retries=0, python=python)
    with Rewarder([spec], folder) as rewarder:
        return rewarder.score([RewardInput("", "", answer, "stop")])[0]


def test_there_is_no_network(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = score(folder, "network", str(server.getsockname()[1]))
    assert found.value is None and "Error" in found.error


def test_other_files_and_processes_are_hidden(folder: Path) -> None:
    (secret := folder.parent / "secret").write_text("x")
    parts = score(folder, "look", str(secret)).parts
    assert parts["seen"] == 0.0 and parts["processes"] <= 3
    assert score(folder, "look", str(folder / "score.py")).parts["seen"] == 1.0
    assert score(folder, "look", os.environ["LORAD_HOME"] + "/lorad.db").parts["seen"] == 0.0


def test_nothing_is_written_outside(folder: Path) -> None:
    assert "Read-only file system" in score(folder, "write", str(folder / "new")).error


def test_what_it_starts_ends_with_it(folder: Path) -> None:
    assert score(folder, "leave", "98765.4").value == 1.0
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if "98765.4" in (p.info["cmdline"] or [])]


def test_another_interpreter_runs_there(folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "apart", with_pip=False)
    python = str(tmp_path / "apart" / "bin" / "python")
    assert score(folder, "look", "/usr", python=python).parts["seen"] == 1.0


def test_environments_play_there(folder: Path) -> None:
    """They see no files that are not theirs, and no driver, whose memory and variables /proc would show."""
    (folder / "envs.py").write_text(LOOKS)
    (secret := folder.parent / "secret").write_text("x")
    row = {"path": str(secret), "command": Path("/proc/self/cmdline").read_text()}
    inside, plain = EnvSpec(name="envs.py:Looks", sandbox="bubblewrap"), EnvSpec(name="envs.py:Looks")
    for spec, seen in ((inside, "False False"), (plain, "True True")):
        host = EnvironmentHost(spec, folder)
        try:
            assert host.begin([Task(row, 0)])[0][1].messages == seen
        finally:
            host.close()


@pytest.mark.parametrize("home", [".", "me/deeper"])
def test_a_folder_that_holds_homes_is_refused(
    folder: Path, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder / home))
    with pytest.raises(SpecError, match="all of which the sandbox would show"):
        Rewarder([RewardSpec(name="score.py:look", sandbox="bubblewrap")], folder)


def test_without_bubblewrap_the_key_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(SpecError, match=r"reward.sandbox: there is no bwrap here") as refused:
        Rewarder([RewardSpec(name="score.py:look", sandbox="bubblewrap")], folder)
    assert "apt install bubblewrap" in refused.value.hint
