"""Episodes ahead of training: each is of one version from its first turn to its last, whatever is killed."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from lorad.daemon.record.audit import audit
from lorad.driver.sample import make, plan
from lorad.errors import LoradError
from lorad.protocol.driver_params import write_params
from tests.driver.driven import Driven, start_driver
from tests.kit.pool_kit import Running, running_pool, swapped, until

HOW = (
    *("data.train=lookup", "env={name: 'envs.py:Waits', turns: 3, workers: 2}", "rollout.max_staleness=2"),
    *("trainer.steps=4", "checkpoint.every=1", "eval.every=2", "lora.dropout=0"),
)
SLEEP = "86397.5"  # seconds of a process that nothing may leave behind
ENVS = f"""
import os, subprocess, time
from lorad.envs.lookup import Lookup
SLEEP = "{SLEEP}"

class Waits(Lookup):
    '''lookup, whose second turn of the row that a file names has no end, once.'''
    def reset(self, row, seed):
        self.prompt, self.heard = row["prompt"], 0
        return super().reset(row, seed)

    def step(self, turn):
        self.heard += 1
        if self.heard == 2 and os.path.exists("wait"):
            if open("wait").read() == self.prompt:
                os.rename("wait", "waited")
                subprocess.Popen(["sleep", SLEEP], start_new_session=True)
                time.sleep(60)
        return super().step(turn)

class Noted(Lookup):
    '''lookup, which writes down which process has which row.'''
    def reset(self, row, seed):
        with open("noted", "a") as file:
            print(os.getpid(), row["prompt"], file=file)
        return super().reset(row, seed)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def calm(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    home = tmp_path_factory.mktemp("calm")
    (home / "envs.py").write_text(ENVS)
    run = Driven(running, home, "calm", *HOW)
    assert run.drive().reason == "completed"
    return run


def samples(run: Driven, step: int) -> list[dict[str, Any]]:
    text = (run.run.root / run.facts("step")[step - 1].data["samples"]).read_text()
    return [msgspec.json.decode(line) for line in text.splitlines()]


@pytest.mark.system
def test_episodes_are_as_old_as_the_lag(calm: Driven) -> None:
    steps = calm.facts("step")
    assert [r.data["metrics"]["staleness"] for r in steps] == [0, 1, 2, 2]
    for step, fact in enumerate(steps, 1):
        assert {s["version"] for s in samples(calm, step)} == {f"calm@{fact.data['version']}"}
        assert max(len(s["turns"]) for s in samples(calm, step)) > 1
    assert audit(calm.run.root) == []


def left_behind(home: Path) -> list[str]:
    """What environments that were started in `home` are, and what they started."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = " ".join(process.info["cmdline"] or [])
        is_mine = process.info["cwd"] == str(home)
        found += [command] * (is_mine and ("lorad.envs.child" in command or SLEEP in command))
    return found


@pytest.mark.system
def test_killed_in_mid_turn_equals_undisturbed(
    running: Running, calm: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs.py").write_text(ENVS)
    run = Driven(running, tmp_path, "killed", *HOW)
    (tmp_path / "wait").write_text(samples(calm, 4)[0]["prompt"])
    directory = run.run.attempt(run.next().attempt).root
    write_params(directory, run.params)
    child = start_driver(directory, tmp_path)
    until(lambda: (tmp_path / "waited").exists() and len(run.facts("checkpoint")) > 0)
    assert any(SLEEP in command for command in left_behind(tmp_path))  # the turn goes on
    child.send_signal(signal.SIGKILL)
    child.wait()
    until(lambda: not left_behind(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert len(run.facts("step")) < 4 and run.drive().reason == "completed"
    assert run.outcome() == calm.outcome()


@pytest.mark.parametrize("name", ["waves", "free"])
def test_a_version_in_mid_episode_is_refused(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "envs.py").write_text(ENVS)
    how = ("rollout.max_staleness=0", "eval.every=0", f"deterministic={name == 'waves'}".lower())
    run = Driven(running, tmp_path, name, *HOW, *how)
    says = f"tokens of swapped@7 came for {name}@0"
    with run.begun() as session, swapped(monkeypatch) as turns, pytest.raises(LoradError, match=says):
        make(session, session.pool, plan(session, 0, 0, 0, 0, {}))
    assert turns.count(1) >= 1


@pytest.mark.system
def test_evals_share_no_environment_with_training(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations after every step change nothing, and wait for no episode that is played ahead."""
    (tmp_path / "envs.py").write_text(ENVS)
    monkeypatch.chdir(tmp_path)
    how = (
        *(*HOW, "env={name: 'envs.py:Noted', turns: 3, workers: 1}", "rollout.max_staleness=2"),
        "trainer.steps=2",
    )
    alone = Driven(running, tmp_path, "alone", *how, "eval.every=0")
    assert alone.drive().reason == "completed"
    (tmp_path / "noted").unlink()
    both = Driven(running, tmp_path, "both", *how, "eval.every=1")
    assert both.drive().reason == "completed" and len(both.facts("eval")) == 3
    assert both.outcome() | {"evals": []} == alone.outcome() | {"evals": []}
    trained = {line["task"]["row"]["prompt"] for step in (1, 2) for line in samples(both, step)}
    noted = [line.split() for line in (tmp_path / "noted").read_text().splitlines()]
    training = {pid for pid, prompt in noted if prompt in trained}
    others = {pid for pid, prompt in noted if prompt not in trained}
    assert len(training) == 1 and others - training
