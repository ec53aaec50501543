"""Episodes that wait for nothing but their own turns."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.driver.sample import make, plan
from lorad.envs.lending import Lending
from lorad.errors import PoolLost
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool, until

SLOW = 0.4
HOW = (
    *("data.train=lookup", "data.prompts_per_step=4", "algorithm.group_size=1", "eval.every=0"),
    *("trainer.steps=1", "algorithm.name=reinforce"),
)
DATA = ("data.train=rows.jsonl", "env={name: 'envs.py:Late', turns: 4, workers: 4, format: text}")
ROWS = b"\n".join(msgspec.json.encode({"prompt": "-", "answer": "-", "slow": i + 1}) for i in range(4))
ENVS = f"""
import time
from lorad.envs.protocol import Observation

class Late:
    '''Four turns, also of words that were cut off; one is slow, of each row another.'''
    def reset(self, row, seed):
        self.heard, self.slow = 0, row["slow"]
        return Observation(f"{{self.slow}}:")

    def step(self, turn):
        self.heard += 1
        if self.heard == self.slow:
            time.sleep({SLOW})
        return Observation("go on:" if self.heard < 4 else None, 0.25, replaces=True)

    def close(self):
        pass

class Endless(Late):
    '''The turns of the first row take ever longer.'''
    def step(self, turn):
        time.sleep(0.3 * (self.slow == 1))
        return super().step(turn)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=False) as pool:
        yield pool


def driven(running: Running, home: Path, name: str, *overrides: str, env: str = "Late") -> Driven:
    (home / "envs.py").write_text(ENVS)
    (home / "rows.jsonl").write_bytes(ROWS)
    run = Driven(running, home, name, *HOW, *DATA, f"env.name=envs.py:{env}", *overrides)
    end = run.drive()
    assert end.reason == "completed", end
    return run


def samples(run: Driven) -> list[dict[str, Any]]:
    text = (run.run.root / run.facts("step")[0].data["samples"]).read_text()
    return [msgspec.json.decode(line) for line in text.splitlines()]


@pytest.mark.system
def test_slow_turns_hold_up_no_other_episode(running: Running, tmp_path: Path) -> None:
    waves = driven(running, tmp_path, "waves", "deterministic=true", "trainer.steps=2")
    free = driven(running, tmp_path, "free", "deterministic=false", "trainer.steps=2")
    seconds = [run.facts("step")[1].data["metrics"]["seconds_sampling"] for run in (waves, free)]
    assert seconds[1] < seconds[0], seconds
    for run in (waves, free):
        assert [len(s["turns"]) for s in samples(run)] == [4] * 4
        assert {s["version"] for s in samples(run)} == {f"{run.params.run}@0"}
    assert [s["prompt"] for s in samples(free)] == [s["prompt"] for s in samples(waves)]
    assert free.facts("step")[0].data["metrics"]["logprob_difference"] == pytest.approx(0, abs=1e-3)


@pytest.mark.system
def test_an_episode_has_its_time(running: Running, tmp_path: Path) -> None:
    how = ("deterministic=false", "env.episode_timeout=1.0", "reward.max_failures=0.5")
    made = samples(driven(running, tmp_path, "late", *how, env="Endless"))
    assert [s["end"] for s in made].count("failed") == 1
    (failed,) = (s for s in made if s["end"] == "failed")
    assert failed["prompt"] == "1:" and "its turns took 1 s (env.episode_timeout)" in failed["error"]


@pytest.mark.system
def test_free_episodes_are_played_ahead(running: Running, tmp_path: Path) -> None:
    how = ("deterministic=false", "rollout.max_staleness=2", "trainer.steps=3")
    run = driven(running, tmp_path, "ahead", *how)
    assert [r.data["metrics"]["staleness"] for r in run.facts("step")] == [0, 1, 2]
    assert audit(run.run.root) == []
    assert not [t for t in threading.enumerate() if t.name.startswith(("episode", "sampler"))]


@pytest.mark.system
def test_an_abort_ends_free_episodes_in_mid_turn(running: Running, tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVS)
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    run = Driven(running, tmp_path, "aborted", *HOW, *DATA, "env.name=envs.py:Endless", "deterministic=false")
    with run.begun() as session, ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(make, session, session.pool, plan(session, 0, 0, 0, 0, {}))
        until(lambda: len(session.pool._others) == 4)
        session.pool.abort()
        with pytest.raises(PoolLost):
            under_way.result()
        assert session.pool._others == []


def test_an_episode_waits_for_its_own_worker() -> None:
    lending = Lending(2)
    assert lending.take(0) == (0, None) and lending.take(1) == (1, None)
    lending.give(1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(lending.take(0, cost=60.0)))
    thread.start()
    until(lambda: bool(lending._waiting))
    assert not found
    lending.give(0)
    thread.join()
    assert found == [(0, None)]


def test_a_busy_worker_is_left_for_another() -> None:
    lending = Lending(2)
    lending.take(0)
    started = time.monotonic()
    assert lending.take(0, cost=0.2) == (1, 0)
    assert time.monotonic() - started >= 0.2
    lending.give(1)
    assert lending.forget(0) == 1 and lending.take(1) == (1, None)
