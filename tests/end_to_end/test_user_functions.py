"""Runs with a loss and an advantage of the user's: the same as lorad's own, also after a kill."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.world import World, world

pytestmark = pytest.mark.system

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16}
algorithm: {group_size: 4, epochs: 2, minibatches: 2, drop_zero_variance: false}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 3}
rollout: {max_new_tokens: 12}
eval: {every: 3, problems: 8}
checkpoint: {every: 2}
"""
MINE = """
import numpy as np

def advantage(rewards, group_sizes):
    found, groups = np.zeros(rewards.size), np.repeat(np.arange(len(group_sizes)), group_sizes)
    for group in range(len(group_sizes)):
        mine = rewards[groups == group]
        if np.ptp(mine):
            found[groups == group] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-4)
    return found

def of_tokens(rewards, group_sizes, lengths):
    return np.repeat(advantage(rewards, group_sizes), lengths)

def clip(logprobs, old, advantages, mask):
    ratio = np.exp(logprobs - old)
    free, held = -ratio * advantages, -ratio.clip(0.8, 1.2) * advantages
    return np.maximum(free, held)[mask].mean(), np.where(free >= held, free, 0.0) * mask / mask.sum()

def towards(logprobs, ref, advantages):
    difference = logprobs - ref + 0.1
    return (difference ** 2 / 2).sum() / 1000, difference / 1000

def late(logprobs, groups):
    return 0.0, np.full(logprobs.size, np.nan if groups.sum() > 5 else 0.0)
"""
IN_TORCH = """
import torch
from lorad.rl.user.autograd import differentiated

@differentiated
def clip(logprobs, old, advantages, mask):
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[mask].mean()
"""
FIGURES = ("reward", "loss", "entropy", "grad_norm", "ratio")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as home:
        (home.root / "mine.py").write_text(MINE)
        (home.root / "in_torch.py").write_text(IN_TORCH)
        home.run("grpo", text=SPEC)
        yield home


def figures(made: World, run: str) -> list[float]:
    return [step.metrics[figure] or 0.0 for step in made.client.steps(run) for figure in FIGURES]


# one advantage for each sample has the next test, too, where more can go wrong
@pytest.mark.parametrize("function", [pytest.param("advantage", marks=pytest.mark.long), "of_tokens"])
def test_grpos_advantage_gives_the_same_bits(made: World, function: str) -> None:
    made.run(function, f"algorithm.advantage=mine.py:{function}", text=SPEC)
    assert made.facts(function) == made.facts("grpo")


FAILING = """
def score(completion, answer):
    assert len(completion) % 3
    return float(completion == answer)
"""


LEAVES_OUT = [
    *("reward={name: failing.py:score, max_failures: 1.0, retries: 0}", "algorithm.truncated=mask"),
    *("algorithm.drop_zero_variance=true", "rollout.max_staleness=1", "rollout.max_new_tokens=7"),
    *("algorithm.epochs=1", "trainer.steps=6"),
]


@pytest.fixture(scope="module")
def left_out(made: World) -> dict[str, Any]:
    """The facts of a run some of whose samples are left out, with lorad's own advantage."""
    (made.root / "failing.py").write_text(FAILING)
    made.run("plain", *LEAVES_OUT, text=SPEC)
    return made.facts("plain")


@pytest.mark.parametrize("function", ["advantage", "of_tokens"])
def test_samples_left_out_leave_the_bits_alone(made: World, left_out: dict[str, Any], function: str) -> None:
    """Some rewards fail, cut samples are masked, groups of equal rewards are dropped, samples are stale."""
    made.run(f"own-{function}", *LEAVES_OUT, f"algorithm.advantage=mine.py:{function}", text=SPEC)
    assert made.facts(f"own-{function}") == left_out
    for metric in ("failed_rewards", "truncated", "zero_variance_groups", "updates"):
        assert sum(step.metrics[metric] or 0 for step in made.client.steps(f"own-{function}")) > 0, metric


@pytest.mark.parametrize("file", ["mine", pytest.param("in_torch", marks=pytest.mark.long)])
def test_the_clip_loss_gives_the_same_run(made: World, file: str) -> None:
    made.run(f"clip-{file}", f"algorithm.loss={file}.py:clip", text=SPEC)
    mine, theirs = made.facts(f"clip-{file}"), made.facts("grpo")
    assert mine["samples"] == theirs["samples"] and mine["evals"] == theirs["evals"]
    assert figures(made, f"clip-{file}")[5:] == pytest.approx(figures(made, "grpo")[5:], rel=1e-3, abs=1e-5)


def test_a_reference_is_given_where_one_is_named(made: World) -> None:
    keys = ("algorithm.name=custom", "algorithm.loss=mine.py:towards")
    assert "NoneType" in made.lorad("run", made.spec(SPEC), *keys, expect=2).stderr
    run = made.run("pulled", *keys, "algorithm.kl.reference=base", text=SPEC)
    assert run.reason == "completed" and figures(made, "pulled")[1] > 0


def test_killed_run_with_functions_resumes_exactly(made: World) -> None:
    functions = ("algorithm.loss=mine.py:clip", "algorithm.advantage=mine.py:advantage")
    keys = (*functions, "algorithm.epochs=1", "trainer.steps=6")
    made.run("calm", *keys, text=SPEC)
    made.lorad("run", made.spec(SPEC), *keys, "--name", "killed", "--detach")
    made.strike("killed", "driver", 2)
    assert made.over("killed").reason == "lost"
    made.lorad("resume", "killed", "--wait")
    assert made.facts("killed") == made.facts("calm")


def test_a_wrong_answer_ends_the_run_resumably(made: World) -> None:
    made.lorad("run", made.spec(SPEC), "algorithm.loss=mine.py:late", "--name", "late", "--detach")
    over = made.over("late")
    assert over.reason == "failed" and over.detail.startswith("algorithm.loss: late of ")
    assert "the derivative of token 0 is nan" in over.detail and "`lorad resume late`" in over.detail
    (made.root / "mine.py").write_text(MINE.replace("np.nan if", "0.0 if"))
    told = made.lorad("resume", "late", "--wait").stderr
    assert f"warning: algorithm.loss: {made.root / 'mine.py'} is not what it was in the attempt" in told
    kept = [made.home.run("late").attempt(number).work / "loss.py" for number in (1, 2)]
    assert ["np.nan" in file.read_text() for file in kept] == [True, False]


def test_show_names_the_functions_among_the_parts(made: World) -> None:
    shown = made.lorad("show", "clip-mine").stdout
    assert "loss" in shown and "mine.py:clip" in shown.partition("algorithm")[2].partition("\n")[0]
