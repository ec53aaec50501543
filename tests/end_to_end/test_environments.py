"""Runs whose samples are episodes of several turns, from the command line to what is kept of them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.kit.world import World, world

pytestmark = pytest.mark.system

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16}
algorithm: {group_size: 4, epochs: 2, minibatches: 2}
data: {train: lookup, prompts_per_step: 4}
env: {name: lookup, turns: 3}
trainer: {lr: 2.0e-3, steps: 4}
rollout: {max_new_tokens: 12}
eval: {every: 4, problems: 8}
checkpoint: {every: 2}
"""
MINE = """
import re
from lorad.envs.protocol import Observation

class Hangs:
    '''The lookup of lorad, but for one row in each step, whose second turn never ends.'''
    def __init__(self):
        from lorad.envs.lookup import Lookup
        self.inner, self.heard = Lookup(), 0

    def reset(self, row, seed):
        self.hangs = row["prompt"] == "R:clnd="
        return self.inner.reset(row, seed)

    def step(self, turn):
        self.heard += 1
        if self.hangs and self.heard == 2:
            re.match(r"(a+)+$", "a" * 64 + "b")
        return self.inner.step(turn)

    def close(self):
        pass

class Limited:
    '''Never ends; its first answer replaces the history, and at the limit it counts what it heard.'''
    def __init__(self):
        self.heard = []

    def reset(self, row, seed):
        return Observation(row["prompt"])

    def step(self, turn):
        self.heard.append(turn.text)
        return Observation(f"S:{len(turn.text)}=", 0.1, replaces=len(self.heard) == 1)

    def at_limit(self):
        return len("".join(self.heard)) / 100

    def close(self):
        pass

class Clock:
    '''Answers with the time.'''
    def reset(self, row, seed):
        return Observation(row["prompt"])

    def step(self, turn):
        import time
        return Observation(f"{time.time_ns()}=")

    def close(self):
        pass
"""


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[World, dict[str, Any]]]:
    with world() as made:
        made.run("calm", text=SPEC)
        (made.root / "envs.py").write_text(MINE)
        (made.root / "agent.py").write_text("async def run(base_url, task): ...\n")
        yield made, made.facts("calm")


def test_episodes_are_kept_turn_by_turn(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    samples = made.client.samples("calm", step=4)
    assert {len(sample.turns) for sample in samples} >= {2, 3}
    for sample in samples:
        assert sample.end in ("done", "length", "turns")
        assert len(sample.logprobs) == sum(turn.tokens for turn in sample.turns)
        assert len(sample.tokens) == sum(turn.tokens + turn.observed for turn in sample.turns)
        assert sample.reward == pytest.approx(sum(turn.reward for turn in sample.turns))
    found = next(s for s in samples if any(turn.observation.startswith("\nS:") for turn in s.turns))
    assert found.prompt[2:-1] == found.turns[-2].text.strip()[::-1]
    metrics = made.client.steps("calm")[-1].metrics
    assert 2 <= (metrics["turns"] or 0) <= 3 and metrics["observation_tokens"] and "env/solved" in metrics
    assert metrics["logprob_difference"] == pytest.approx(0, abs=1e-4)


def test_one_sample_is_shown_as_a_transcript(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    shown = made.lorad("samples", "calm", "--step", 4, "--sample", 1).stdout
    assert "turn 1" in shown and "observation 1" in shown and "reward 2" in shown


def test_eval_plays_what_the_run_has_played(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    of_run = made.client.evals("calm")[-1]
    found = made.json("eval", f"calm@{made.client.show('calm').version}", "lookup", "--problems", 8)
    assert (found["metrics"]["score"], found["settings"]["env"]) == (of_run.score, "lookup")
    refused = made.lorad("eval", "calm", "lookup", "--reward", "exact_match", expect=2).stderr
    assert "episodes of lookup have the reward that it gives" in refused
    program = made.lorad("eval", "calm", "lookup", "--env", "agent.py:run", expect=1).stderr
    assert "agent.py:run is an agent program" in program


def test_replay_finds_what_differs(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    assert "16 episodes of step 4 played again, 0 differ" in made.lorad("replay", "calm").stderr
    made.run("replayed", "env.name=envs.py:Hangs", "trainer.steps=1", text=SPEC)
    (made.root / "envs.py").write_text(
        MINE.replace("self.inner.step(turn)", "self.inner.step(turn) and None")
    )
    told = made.json("replay", "replayed", expect=1)
    (made.root / "envs.py").write_text(MINE)
    assert len(told["differences"]) == told["episodes"] == 16
    assert "returned NoneType, not an Observation" in told["differences"][0]["differs"]
    refused = made.lorad("replay", "nobody", expect=3).stderr
    assert "nobody" in refused


def test_replay_knows_forks_and_limits(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    made.run("limited", "env.name=envs.py:Limited", "trainer.steps=1", "eval.every=0", text=SPEC)
    samples = made.client.samples("limited", step=1)
    assert {sample.end for sample in samples} >= {"turns"} and all(sample.rows == 2 for sample in samples)
    assert all((sample.reward or 0) > 0.1 * len(sample.turns) for sample in samples)
    assert "16 episodes of step 1 played again, 0 differ" in made.lorad("replay", "limited").stderr
    changes = {
        "replaces=False": ("replaces=len(self.heard) == 1", 2, "it adds to the history, recorded: it repl"),
        "/ 50": ("/ 100", 3, "reward "),
    }
    for now, (before, turn, says) in changes.items():
        (made.root / "envs.py").write_text(MINE.replace(before, now))
        differences = made.json("replay", "limited", expect=1)["differences"]
        (made.root / "envs.py").write_text(MINE)
        assert len(differences) == 16, (now, differences)
        assert all(one["turn"] <= turn and one["differs"].startswith(says) for one in differences)


@pytest.mark.long  # in CI both are killed amid an episode, see test_environment_kills.py
@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_killed_and_resumed_equals_undisturbed(calm: tuple[World, dict[str, Any]], victim: str) -> None:
    made, expected = calm
    name = f"killed-{victim}"
    made.lorad("run", made.spec(SPEC), "--name", name, "--detach")
    made.strike(name, victim, 2)
    assert made.over(name).reason == "lost"
    made.lorad("resume", name, "--wait")
    assert made.facts(name) == expected


def test_killed_environments_change_nothing(calm: tuple[World, dict[str, Any]]) -> None:
    made, expected = calm
    made.lorad("run", made.spec(SPEC), "--name", "struck", "--detach")
    driver, struck = psutil.Process(made.pid("struck", "driver")), 0
    for step in (1, 2):
        made.reached("struck", step)
        for process in driver.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "lorad.envs.child" in process.cmdline():
                    process.kill()
                    struck += 1
    assert made.over("struck").reason == "completed"
    assert struck and made.facts("struck") == expected


def test_hanging_episodes_are_left_out(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    run = made.run(
        "hangs", "seed=0", "env={name: 'envs.py:Hangs', timeout: 0.5, retry: 0}", "trainer.steps=1",
        "eval.every=0", "algorithm.group_size=2", text=SPEC,
    )  # fmt: skip
    assert run.reason == "completed"
    samples = made.client.samples("hangs", step=1)
    failed = [sample for sample in samples if sample.end == "failed"]
    assert failed and {sample.prompt for sample in failed} == {"R:clnd="}
    assert all("no result within" in (sample.error or "") and sample.reward is None for sample in failed)
    assert made.client.steps("hangs")[0].metrics["failed_rewards"] == len(failed)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("env=null",), "data.train: its rows are for the environment lookup"),
        (("env.name=envs.py:Clock",), "step answered two episodes of one row otherwise"),
        (("reward=gsm8k",), "reward: the environment lookup gives the reward"),
        (("algorithm=sft",), "env.name: sft trains on the completions"),
        (("env.name=agent.py:run",), "deterministic: agent.py:run is an agent program"),
        (("env.name=agent.py:run", "deterministic=false"), "env.format: agent.py:run is an agent program"),
        (("env.name=agent.py:runs", "deterministic=false"), "agent.py has no function runs"),
        (("env.python=/bin/none",), "env.python: there is no program /bin/none"),
        (("env.concurrency=2",), "env.concurrency: lookup is a class"),
        (("env.max_tokens=15",), "env.max_tokens: the first observation has "),
        (("env.max_tokens=100000",), "positions of the model"),
        (("env.format=chat",), "env.format: the chat template"),
        (("env.tools=2",), "env.tools: unknown key"),
    ],
)
def test_what_cannot_be_played_is_refused(
    calm: tuple[World, dict[str, Any]], overrides: tuple[str, ...], says: str
) -> None:
    made, _ = calm
    told = made.lorad("run", made.spec(SPEC), *overrides, "--name", "refused", expect=2).stderr
    assert says in told, told


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lookup_is_learnt(calm: tuple[World, dict[str, Any]], seed: int) -> None:
    made, _ = calm
    made.run(
        f"learns-{seed}",
        *(f"seed={seed}", "lora={rank: 16, alpha: 32}", "algorithm={group_size: 8}"),
        *("data.prompts_per_step=8", "trainer={lr: 1.5e-3, steps: 200}", "eval={every: 50, problems: 256}"),
        text=SPEC,
    )
    scores = [one.score or 0.0 for one in made.client.evals(f"learns-{seed}")]
    assert scores[0] < 0.1 and scores[-1] >= 0.9, scores
