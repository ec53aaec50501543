"""Processes of rewards: how many there are, and how much time the first call of each has."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.driver.rewards import Rewarder
from lorad.driver.user import pace
from lorad.driver.user.pace import FirstCalls, Growth
from lorad.protocol.heartbeat import HEART
from lorad.rl.reward import RewardInput
from lorad.spec.reward import RewardSpec

Make = Callable[..., Rewarder]
GIB = 1 << 30


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Rewarder] = []

    def make(source: str, **settings: Any) -> Rewarder:
        (tmp_path / "rewards.py").write_text(source)
        made.append(Rewarder([RewardSpec(name="rewards.py:reward", **settings)], tmp_path))
        return made[-1]

    yield make
    for rewarder in made:
        rewarder.close()


def samples(*completions: str) -> list[RewardInput]:
    return [RewardInput("p", text, "a", "stop") for text in completions]


def workers() -> int:
    return sum(thread.name == "rewards" for thread in threading.enumerate())


LOADS = """
import time
model = None
def reward(completion):
    global model
    if model is None:
        time.sleep(1.5)
        model = len
    time.sleep(100 * (completion == "hang"))
    return model(completion)
"""


@pytest.mark.system
def test_first_call_may_load_a_model(make: Make) -> None:
    rewarder = make(LOADS, timeout=0.5, workers=1, retries=0)
    scores = rewarder.score(samples("a", "ab", "hang", "abc"))
    assert [score.value for score in scores] == [1.0, 2.0, None, 3.0]
    assert scores[2].error == "no result within 0.5 s"
    (note,) = rewarder.notes()
    assert "first call of rewards.py:reward" in note and "reward.timeout (0.5 s)" in note
    assert rewarder.notes() == []


@pytest.mark.system
def test_run_says_that_a_first_call_is_slow(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(HEART, "tell", told.append)
    make(LOADS.replace("1.5", "3"), timeout=0.5, workers=1).score(samples("a"))
    assert told[0].startswith("waiting for the first call of the reward, ")


@pytest.mark.system
def test_function_that_never_ends_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_FIRST_SECONDS", 0.3)
    monkeypatch.setattr(pace, "_FIRST_TIMES", 3.0)
    rewarder = make("import time\ndef reward(): time.sleep(100)", timeout=0.1, workers=1)
    errors = {score.error for score in rewarder.score(samples(*"abcdefgh"))}
    (error,) = errors
    assert error.startswith("no call of rewards.py:reward has ever ended: 3 processes were killed")
    assert "Raise reward.timeout" in error


def test_later_processes_have_what_the_slowest_took() -> None:
    first = FirstCalls("f.py:g", 10.0)
    assert first.seconds == 100.0
    first.note_end(40.0)
    first.note_end(0.1)
    assert first.seconds == 90.0 and first.note_loss() == first.note_loss() == first.note_loss() == ""


ASYNC = """
import asyncio, time
model = None
async def reward(completion):
    global model
    await asyncio.sleep(0)
    if model is None:
        model = len
        time.sleep(1.2)
    await asyncio.sleep(0.1)
    return model(completion)
"""


@pytest.mark.system
def test_blocked_loop_takes_no_time_of_others(make: Make) -> None:
    scores = make(ASYNC, timeout=0.8, workers=1, retries=0).score(samples("a", "ab", "abc"))
    assert [score.value for score in scores] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("seconds", "computed", "memory", "worth"),
    [
        (0.1, 0.0, 1, 2),  # too little to say
        (10.0, 9.0, 1, 2),
        (10.0, 20.0, 1, 2),  # what a subprocess computed, on other cores
        (10.0, 1.0, 1, 20),
        (10.0, 0.0, 1, 64),
        (10.0, 0.0, GIB, 4),  # a quarter of 8 GiB
        (10.0, 0.0, 4 * GIB, 2),
    ],
)
def test_processes_follow_what_calls_compute(
    seconds: float, computed: float, memory: int, worth: int
) -> None:
    growth = Growth(cores=2, available=lambda: 8 * GIB)
    growth.note_call(seconds, computed, memory)
    assert growth.worth(2) == worth


TOGETHER = """
import os, pathlib, time
def reward(completion):
    place = pathlib.Path(completion)
    (place / str(os.getpid())).touch()
    time.sleep(0.1)
    return len(list(place.iterdir()))
"""


@pytest.mark.system
def test_graders_that_wait_get_more_processes(make: Make, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    rewarder = make(TOGETHER)
    scores = rewarder.score(samples(*[str(tmp_path / "seen")] * 64))
    assert workers() > 8
    assert max(score.value or 0 for score in scores) > 2


COMPUTES = """
import time
def reward():
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
"""


@pytest.mark.system
def test_graders_that_compute_get_no_more(make: Make) -> None:
    rewarder = make(COMPUTES, timeout=60, retries=0)
    rewarder.score(samples(*"abcdefghijklmnop"))
    assert workers() <= 8


SPAWNS = """
import multiprocessing
def square(x): return x * x
def reward(completion):
    with multiprocessing.get_context(completion).Pool(1) as workers:
        return float(sum(workers.map(square, [1, 2])))
"""


@pytest.mark.system
def test_rewards_may_spawn_processes(make: Make) -> None:
    scores = make(SPAWNS, timeout=60, retries=0).score(samples("spawn", "forkserver", "fork"))
    assert [score.value for score in scores] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("name", ["json.py", "lorad.py", "my.own.py", "sys.py", "a-b.py"])
def test_names_of_files_hide_no_module(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("import json, sys, lorad.errors\ndef reward(): return len(json.dumps('a'))")
    with Rewarder([RewardSpec(name=f"{name}:reward")], tmp_path) as rewarder:
        assert rewarder.score(samples("x"))[0].value == 3.0
