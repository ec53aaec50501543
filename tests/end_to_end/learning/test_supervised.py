"""Runs that train on completions of their data, from the command line to RL that starts from them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.protocol.journal import read
from lorad.records.versions import Version
from tests.kit.world import World, world

pytestmark = pytest.mark.system

SFT = """
seed: 3
algorithm: sft
lora: {rank: 8, alpha: 16, dropout: 0.1}
data: {train: sort, prompts_per_step: 8}
trainer: {lr: 2.0e-3, steps: 14, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 7, problems: 32}
checkpoint: {every: 4, keep: 0}
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        it.run("tuned", text=SFT)
        yield it


def versions(made: World, run: str) -> list[Version]:
    return made.client.adapters(run)


def rows(directory: Path, count: int, **more: Any) -> None:
    numbers = [str(n * 7919 % 100000) for n in range(1, count + 1)]
    written = [{"prompt": f"S:{n}=", "completion": "".join(sorted(n))} | more for n in numbers]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))


def test_likelihood_and_greedy_reward_rise(made: World) -> None:
    steps = made.client.steps("tuned")
    first, last = steps[6].metrics["held_out_loss"], steps[-1].metrics["held_out_loss"]
    assert first is not None and last is not None and last < first < 0.2
    assert "reward" not in steps[0].metrics and steps[0].metrics["trained_tokens"]
    scores = [e.score or 0.0 for e in made.client.evals("tuned")]
    assert len(scores) == 3 and scores[-1] > scores[0] + 0.3


def test_only_what_is_needed_is_published(made: World) -> None:
    assert [v.step for v in versions(made, "tuned")] == [0, 4, 7, 8, 12, 14]


@pytest.mark.parametrize("victim", ["driver", pytest.param("pool", marks=pytest.mark.long)])
def test_killed_and_resumed_equals_undisturbed(made: World, victim: str) -> None:
    name = f"killed-{victim}"
    made.lorad("run", made.spec(SFT), "--name", name, "--detach")
    made.strike(name, victim, 5)
    assert made.over(name).reason == "lost"
    made.lorad("resume", name, "--wait")
    assert made.facts(name) == made.facts("tuned")


def test_reinforcement_begins_where_the_run_ended(made: World) -> None:
    told = made.lorad(
        *("fork", "tuned", "algorithm={name: grpo, group_size: 4, kl: {coef: 0.01}}", "lora.dropout=0"),
        *("trainer.schedule=constant", "--steps", 2, "--name", "rl", "--wait"),
    ).stderr
    assert "warning: only weights are taken: Adam's moments are of sft, not of grpo" in told
    shown, last = made.client.show("rl"), versions(made, "tuned")[-1]
    assert shown.reference is not None and shown.reference.sha256 == last.sha256
    assert shown.reference.name == "start" and shown.origin == f"tuned@{last.version}"
    first = made.client.steps("rl")[0].metrics
    assert abs(first["kl"] or 0.0) < 1e-6 and "reward" in first
    assert versions(made, "rl")[0].sha256 == last.sha256


def test_rows_without_answers_have_no_reward(made: World) -> None:
    rows(made.root, 40)
    told = made.lorad(
        *("run", made.spec(SFT), "data.train=rows.jsonl", "data.eval=rows.jsonl", "trainer.steps=2"),
        *("--name", "unscored", "--wait"),
    ).stderr
    assert "data.train is read as completion" in told and "held out loss" in told
    journal = read(made.home.run("unscored").journal)
    (first, *_) = [r.data for r, _ in journal if r.kind == "eval"]
    assert first["score"] is None and first["nll"] > 0
    assert made.client.show("unscored").reward is None
    (_, last) = made.client.evals("unscored")
    assert last.nll is not None and last.perplexity == pytest.approx(math.exp(last.nll))
    assert last.token_accuracy is not None and 0 < last.token_accuracy <= 1
    found = made.client.show("unscored")
    assert (found.nll_last, found.token_accuracy_last) == (last.nll, last.token_accuracy)
    (step, *_) = made.client.steps("unscored")
    assert 0 <= (step.metrics["token_accuracy"] or 0.0) <= 1
    assert "perplexity" in made.lorad("show", "unscored").stdout
    assert "of tokens right" in made.lorad("show", "unscored").stdout
    assert "nll" in made.lorad("list", "--all").stdout


def test_halving_keeps_the_likelier_run(made: World) -> None:
    rows(made.root, 40)
    made.lorad(
        *("sweep", made.spec(SFT), "data.train=rows.jsonl", "data.eval=rows.jsonl", "trainer.steps=30"),
        *("eval={every: 2, problems: 8}", "trainer.lr=1e-5,1e-3", "--name", "raced", "--rungs", 2, "--wait"),
    )
    (sweep,) = made.client.sweeps("raced")
    assert sweep.halving is not None and sweep.halving.metric == "nll"
    assert (sweep.rungs[0].kept, sweep.rungs[0].stopped) == (["raced-2"], ["raced-1"])


def test_listings_cope_with_absent_rewards(made: World) -> None:
    assert "tuned" in made.lorad("list", "--all").stdout
    assert "negative log-likelihood" in made.lorad("show", "tuned").stdout
    assert "S:" in made.lorad("samples", "tuned").stdout
    assert made.lorad("plot", "tuned", "--metric", "held_out_loss").stdout
