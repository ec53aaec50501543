"""Kill -9 in the middle of an episode: of its process, the driver, the pool, and of all three together."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.driver.attempt.checkpoints import STATE
from lorad.rl.tasks import problem
from tests.kit.world import World, world

pytestmark = pytest.mark.system

SPEC = """
seed: 5
lora: {rank: 8, alpha: 16, dropout: 0.1}
algorithm: {group_size: 4}
data:
  train: rows.jsonl
  chat_template: never
  prompts_per_step: 4
  difficulty: {easy: 0.3, hard: 0.1, keep_easy: 0.5, keep_hard: 0.5}
env: {name: "envs.py:Store", turns: 3, workers: 2, args: {log: calm}}
trainer: {lr: 2.0e-3, steps: 6, schedule: cosine}
rollout: {max_new_tokens: 12}
eval: {every: 0}
checkpoint: {every: 2, keep: 3}
"""
# its turn number `at` is not answered, the first time, and leaves the number of its process behind
STORE = """
import os, time
from lorad.envs.lookup import Lookup

class Store(Lookup):
    def __init__(self, log, at=0):
        self.log, self.at = log, at

    def step(self, turn):
        with open(self.log, "ab") as log:
            log.write(b".")
            log.flush()
            if log.tell() == self.at:
                os.symlink(str(os.getpid()), self.log + ".waits")
                time.sleep(600)
        return super().step(turn)
"""
VICTIMS = {
    "environment": ("environment",),
    "driver": ("driver",),
    "pool": ("pool",),
    "all": ("environment", "driver", "pool"),
}
IN_CI = ("environment", "all")
EACH = [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.long) for name in VICTIMS]


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[World, dict[str, Any]]]:
    """A run that nobody disturbs, and what it came to."""
    with world() as made:
        rows = [problem("lookup", "train", 0, number) for number in range(10)]
        lines = [json.dumps({"prompt": row.prompt, "answer": row.answer}) for row in rows]
        (made.root / "rows.jsonl").write_text("\n".join(lines))
        (made.root / "envs.py").write_text(STORE)
        made.run("calm", f"env.args.log={made.root / 'calm'}", text=SPEC)
        yield made, outcome(made, "calm")


def outcome(made: World, name: str) -> dict[str, Any]:
    """What a run came to, with its curriculum at each checkpoint."""
    states = {
        checkpoint.step: msgspec.json.decode(Path(checkpoint.path, STATE).read_bytes())
        for checkpoint in made.client.checkpoints(name)
    }
    known = {step: (state["position"], state["ratings"]) for step, state in states.items()}
    pools = [
        [step.metrics[name] for name in ("prompts_easy", "prompts_hard")] for step in made.client.steps(name)
    ]
    return made.facts(name) | {"known": known, "pools": pools}


def test_a_curriculum_leaves_prompts_out(calm: tuple[World, dict[str, Any]]) -> None:
    _, expected = calm
    assert {*expected["known"]} == {2, 4, 6} and all(ratings for _, ratings in expected["known"].values())
    position, _ = expected["known"][6]
    assert position > sum(len({prompt for prompt, _ in batch}) for batch in expected["samples"].values())


@pytest.mark.parametrize("victims", EACH)
def test_kills_amid_an_episode_change_nothing(calm: tuple[World, dict[str, Any]], victims: str) -> None:
    made, expected = calm
    log = made.root / victims
    turns = (made.root / "calm").stat().st_size
    args = f"env.args={{log: {log}, at: {turns * 3 // 5}}}"
    made.lorad("run", made.spec(SPEC), args, "--name", victims, "--detach")
    waits = Path(f"{log}.waits")
    made.until(waits.is_symlink, "an episode waits")
    made.reached(victims, 2)
    assert made.client.show(victims).step < 6
    pids = {"environment": int(waits.readlink().name)}
    pids |= {role: made.pid(victims, role) for role in ("driver", "pool")}
    for victim in VICTIMS[victims]:
        with suppress(ProcessLookupError):  # it went with another
            os.kill(pids[victim], signal.SIGKILL)
    if victims != "environment":
        assert made.over(victims).reason == "lost"
        made.lorad("resume", victims, "--wait")
    assert made.over(victims).reason == "completed"
    assert outcome(made, victims) == expected
