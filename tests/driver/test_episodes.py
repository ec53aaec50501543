"""Episodes ahead of training: each is of one version from its first turn to its last, whatever is killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.driver.sample import make, plan
from lorad.errors import LoradError
from lorad.protocol.batch import Chunks
from lorad.protocol.connection import Connection
from lorad.protocol.driver_params import write_params
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool, until

HOW = (
    *("data.train=lookup", "env={name: 'envs.py:Waits', turns: 3}", "rollout.max_staleness=2"),
    *("trainer.steps=6", "checkpoint.every=2", "eval.every=2", "lora.dropout=0"),
)
ENVS = """
import os, time
from lorad.envs.lookup import Lookup

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
                time.sleep(60)
        return super().step(turn)
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


def test_episodes_are_as_old_as_the_lag(calm: Driven) -> None:
    steps = calm.facts("step")
    assert [r.data["metrics"]["staleness"] for r in steps] == [0, 1, 2, 2, 2, 2]
    for step, fact in enumerate(steps, 1):
        assert {s["version"] for s in samples(calm, step)} == {f"calm@{fact.data['version']}"}
        assert max(len(s["turns"]) for s in samples(calm, step)) > 1
    assert audit(calm.run.root) == []


def test_killed_in_mid_turn_equals_undisturbed(
    running: Running, calm: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs.py").write_text(ENVS)
    run = Driven(running, tmp_path, "killed", *HOW)
    (tmp_path / "wait").write_text(samples(calm, 5)[0]["prompt"])
    directory = run.run.attempt(run.next().attempt).root
    write_params(directory, run.params)
    child = subprocess.Popen(
        [sys.executable, "-m", "lorad.driver", str(directory)], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    until(lambda: (tmp_path / "waited").exists() and len(run.facts("checkpoint")) > 0)
    child.send_signal(signal.SIGKILL)
    child.wait()
    monkeypatch.chdir(tmp_path)
    assert len(run.facts("step")) < 6 and run.drive().reason == "completed"
    assert run.outcome() == calm.outcome()


def test_a_version_in_mid_episode_is_refused(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs.py").write_text(ENVS)
    stream = Connection.stream
    calls = list[int]()

    def swapped(self: Connection, verb: str, args: Any) -> Iterator[Any]:
        calls.extend([1] * (verb == "generate"))
        for item in stream(self, verb, args):
            is_second = isinstance(item, Chunks) and len(calls) == 2
            yield msgspec.structs.replace(item, version="swapped@7") if is_second else item

    run = Driven(running, tmp_path, "swapped", *HOW, "rollout.max_staleness=0", "eval.every=0")
    with run.begun() as session:
        monkeypatch.setattr(Connection, "stream", swapped)
        with pytest.raises(LoradError, match="tokens of swapped@7 came for swapped@0"):
            make(session, session.pool, plan(session, 0, 0, 0, 0))
    assert len(calls) == 2
