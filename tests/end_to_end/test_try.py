"""lorad try: a spec on a few rows before it is queued, of which nothing is left."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from lorad.models.directory import resolve
from tests.kit.world import REPOSITORY, SMALL, World, world

pytestmark = pytest.mark.system

SPEC = """
algorithm: {group_size: 4}
data: {train: lookup, prompts_per_step: 4}
env: {name: lookup, turns: 3}
trainer: {lr: 2.0e-3, steps: 8}
rollout: {max_new_tokens: 12}
"""
ENVS = """
import random, time
from lorad.envs.lookup import Lookup
from lorad.envs.protocol import Observation

class Rolls(Lookup):
    '''Its second answer is as the dice fall, which the preflight does not see.'''
    heard = 0
    def step(self, turn):
        self.heard += 1
        return super().step(turn) if self.heard < 2 else Observation(f"{random.random()}=")

class Hangs(Lookup):
    '''Answers nothing that the model says.'''
    def step(self, turn):
        while turn.text:
            time.sleep(1)
        return super().step(turn)
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        (made.root / "envs.py").write_text(ENVS)
        made.spec(SPEC)
        yield made


def processes(made: World) -> list[str]:
    """What runs of a trial beside its pool: driver, environments."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        is_ours = (process.info["environ"] or {}).get("LORAD_HOME") == str(made.home.root)
        if is_ours and ("driver.trial" in words or "envs.child" in words):
            found.append(words)
    return found


def nothing_left(made: World) -> bool:
    return not processes(made) and not [*(made.home.root / "runs").iterdir()]


def test_episodes_are_tried_and_played_again(made: World) -> None:
    told = made.json("try", "spec.yaml", "-n", 3)
    assert len(told["samples"]) == 3 and told["differences"] == []
    assert all(2 <= len(sample["turns"]) <= 3 for sample in told["samples"])
    assert made.client.list(all=True) == []
    made.until(lambda: nothing_left(made), "nothing is left")


def test_prompts_are_sampled_and_scored(made: World) -> None:
    told = made.json("try", "spec.yaml", "env=null", "data.train=sort", "-n", 5)
    assert [sample["reward"] is not None for sample in told["samples"]] == [True] * 5
    assert [sample["turns"] for sample in told["samples"]] == [[]] * 5


def test_next_trial_takes_the_warm_pool(made: World) -> None:
    made.json("try", "spec.yaml", "-n", 1)
    before = [(pool.pool, pool.pid) for pool in made.client.pools()]
    done = made.lorad("try", "spec.yaml", "-n", 1)
    assert [(pool.pool, pool.pid) for pool in made.client.pools()] == before
    assert f"pool {before[0][0]} has builtin:tiny" in done.stderr


def test_busy_device_is_refused_with_its_run(made: World) -> None:
    shutil.copytree(resolve("builtin:tiny"), made.root / "other")
    long = made.spec(SMALL, "long.yaml")
    made.lorad("run", long, "trainer.steps=100000", "--name", "long", "--detach")
    made.reached("long", 1)
    try:
        said = made.lorad("try", "spec.yaml", "model.path=./other", expect=1).stderr
    finally:
        made.lorad("kill", "long")
    made.over("long")
    made.lorad("rm", "long", "--yes")
    assert "is busy with run long\n" in said and "--rewards" in said


def test_what_is_not_replayable_is_named(made: World) -> None:
    done = made.lorad("try", "spec.yaml", "env.name=envs.py:Rolls", "-n", 2, expect=1)
    assert "turn 2  " in done.stdout and "differs at turn 2" in done.stdout
    assert "recorded" in done.stderr and "nothing was queued" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("env.name=envs.py:Nope",), "env.name: "),
        (("algorithm=sft", "env=null", "data.train=sort"), "algorithm.name: sft trains on completions"),
        (("rollout.backend=nothing",), "rollout.backend: "),
    ],
)
def test_what_cannot_be_tried_is_refused(made: World, overrides: tuple[str, ...], says: str) -> None:
    assert says in made.lorad("try", "spec.yaml", *overrides, expect=2).stderr


def test_interrupted_trial_leaves_no_process(made: World) -> None:
    slow = "env={name: 'envs.py:Hangs', timeout: 60}"
    # a job in the background of a shell is born deaf to SIGINT, and so is what it starts
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    hears += "; from lorad.cli.app import main; main()"
    command = [sys.executable, "-c", hears, "try", "spec.yaml", slow]
    env = os.environ | {"LORAD_HOME": str(made.home.root), "PYTHONPATH": str(REPOSITORY)}
    errors = made.root / "errors"
    with errors.open("wb") as stderr:
        child = subprocess.Popen(command, cwd=made.root, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
    made.until(lambda: any("driver.trial" in words for words in processes(made)), "episodes are played")
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130, errors.read_text()
    made.until(lambda: nothing_left(made), "nothing is left")
