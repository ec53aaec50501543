"""User code in bubblewrap sees and reaches nothing that it does not need."""

import os
import shutil
import socket
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorad.driver.rewards import Rewarder
from lorad.envs.episode import Task
from lorad.envs.host import Host
from lorad.errors import SpecError
from lorad.rl.reward import RewardInput
from lorad.spec.env import EnvSpec
from lorad.spec.reward import RewardSpec

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
Ask = Callable[..., float]

ENV = """
import os
from lorad.envs.protocol import Observation
class Env:
    def reset(self, row, seed):
        return Observation(str(os.path.exists(row["home"] + "/secret")))
    def step(self, turn):
        return Observation("", 1.0)
    def close(self):
        pass
"""


def named(folder: Path, body: str, **settings: Any) -> RewardSpec:
    """A reward whose function has this body."""
    (folder / "code").mkdir(exist_ok=True)
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "code" / "mine.py").write_text(f"import os, subprocess, socket\ndef score(prompt):\n{lines}")
    return RewardSpec(name="code/mine.py:score", workers=1, **{"sandbox": "bubblewrap"} | settings)


def _sleeping() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if p.info["cmdline"] == ["sleep", "100007"]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return what a function of this body says; a secret lies in the home."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def ask(body: str, **settings: Any) -> float:
        with Rewarder([named(tmp_path, body, **settings)], tmp_path) as rewarder:
            score = rewarder.score([RewardInput(str(tmp_path), "", "", "stop")])[0]
        assert score.value is not None, score.error
        return score.value

    return ask


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs_bwrap
def test_sandbox_hides_the_home(ask: Ask) -> None:
    body = 'return os.path.exists(prompt + "/home/secret")'
    assert (ask(body), ask(body, sandbox="none")) == (0, 1)


@needs_bwrap
def test_sandbox_has_no_network(ask: Ask, listener: int) -> None:
    body = f'with socket.socket() as s: return s.connect_ex(("127.0.0.1", {listener})) == 0'
    assert (ask(body), ask(body, sandbox="none")) == (0, 1)


@needs_bwrap
def test_sandbox_hides_processes_of_others(ask: Ask) -> None:
    count = 'return sum(name.isdigit() for name in os.listdir("/proc"))'
    assert ask(count) < 5 < ask(count, sandbox="none")


@needs_bwrap
@pytest.mark.parametrize("place", ["prompt + '/code'", "prompt", "'/usr'", "'/etc'", "'/usr/lib'"])
def test_files_within_cannot_be_changed(ask: Ask, tmp_path: Path, place: str) -> None:
    body = f"try: open(os.path.join({place}, 'made'), 'w').close()\nexcept OSError: return 0\nreturn 1"
    ask(body)
    assert not [*tmp_path.rglob("made"), *Path("/usr").glob("made"), *Path("/etc").glob("made")]


@needs_bwrap
def test_user_folder_is_readable_and_tmp_writable(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("VALUE = 7")
    body = 'import helper\nopen("/tmp/made", "w").write("x" * 3)\n'
    assert ask(body + 'return helper.VALUE + len(open(os.environ["HOME"] + "/made").read())') == 10
    assert not Path("/tmp/made").exists()


@needs_bwrap
def test_named_interpreter_runs_in_the_sandbox(ask: Ask, tmp_path: Path) -> None:
    venv.create(tmp_path / "home" / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "home" / "bare" / "bin" / "python")
    body = 'import sys\nreturn sys.prefix.endswith("bare") + 2 * os.path.exists(prompt + "/home/secret")'
    assert ask(body, python=python) == 1


@needs_bwrap
def test_nothing_of_a_sandbox_outlives_it(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    body = 'subprocess.Popen(["setsid", "sleep", "100007"])\nreturn 1'
    with Rewarder([named(tmp_path, body)], tmp_path) as rewarder:
        assert rewarder.score([RewardInput("", "", "", "stop")])[0].value == 1
        while not (sleeping := _sleeping()):
            time.sleep(0.01)
    assert psutil.wait_procs(sleeping, timeout=20)[1] == []
    assert set(psutil.Process().children(recursive=True)) <= before


@needs_bwrap
def test_hanging_and_dying_calls_fail_alone(tmp_path: Path) -> None:
    body = 'import time\nif prompt == "dies": os.kill(os.getpid(), 9)\n'
    spec = named(tmp_path, body + 'time.sleep(1000 * (prompt == "hangs"))\nreturn 1', timeout=0.5, retries=0)
    with Rewarder([spec], tmp_path) as rewarder:
        found = rewarder.score([RewardInput(p, "", "", "stop") for p in ("hangs", "dies", "works")])
    assert [score.value for score in found] == [None, None, 1]
    assert "SIGKILL" in found[1].error


@needs_bwrap
def test_environments_run_in_the_sandbox(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "env.py").write_text(ENV)
    said = []
    for sandbox in ("bubblewrap", "none"):
        host = Host(EnvSpec(name="code/env.py:Env", workers=1, sandbox=sandbox), tmp_path)
        answer = host.begin([Task({"home": str(tmp_path / "home")}, 0)])[0][1]
        said.append(answer.messages or answer.error)
        host.close()
    assert said == ["False", "True"]


@needs_bwrap
def test_file_in_the_home_itself_is_refused(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "home" / "mine.py").write_text("def score(): return 1")
    spec = RewardSpec(name="mine.py:score", sandbox="bubblewrap")
    with pytest.raises(SpecError, match="must not see") as refused:
        Rewarder([spec], tmp_path / "home")
    assert refused.value.key == "reward.sandbox"


@needs_bwrap
def test_refused_namespaces_are_found_by_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "bwrap"  # as bubblewrap ends where the kernel refuses
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    rewarder = Rewarder([named(tmp_path, "return 1")], tmp_path)
    with rewarder, pytest.raises(SpecError, match="No permissions") as refused:
        rewarder.start()
    assert (refused.value.key, "user namespaces" in refused.value.hint) == ("reward.sandbox", True)


def test_missing_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match="no bwrap") as refused:
        Rewarder([named(tmp_path, "return 1")], tmp_path)
    assert (refused.value.key, "bubblewrap" in refused.value.hint) == ("reward.sandbox", True)
