"""How far sft and dpo come on builtin:tiny: what is sampled greedily, not how far the loss falls."""

import json
from collections.abc import Iterator

import pytest

from lorad.rl.tasks import problem
from tests.kit.world import World, world

pytestmark = pytest.mark.system

SPEC = """
data: {train: sort, eval: sort}
rollout: {max_new_tokens: 12}
eval: {every: 10, problems: 128}
checkpoint: {every: 100}
"""
PAIRS = ("algorithm.name=dpo", "data.train=pairs.jsonl", "data.prompts_per_step=64")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        found = [problem("sort", "train", 0, number) for number in range(3000)]
        pairs = [{"prompt": p.prompt, "chosen": p.answer, "rejected": p.prompt[2:-1]} for p in found]
        apart = [json.dumps(pair) + "\n" for pair in pairs if pair["chosen"] != pair["rejected"]]
        (it.root / "pairs.jsonl").write_text("".join(apart))
        yield it


def reward(made: World, name: str, *overrides: str) -> float:
    made.run(name, *overrides, text=SPEC)
    score = made.client.evals(name)[-1].score
    assert score is not None
    return score


def test_completions_teach_the_task(made: World) -> None:
    assert reward(made, "sft", "algorithm.name=sft", "trainer.lr=1e-3", "trainer.steps=30") >= 0.9


@pytest.mark.long
def test_pairs_teach_the_task_at_a_low_rate(made: World) -> None:
    assert reward(made, "low", *PAIRS, "trainer.lr=1e-4", "trainer.steps=40") >= 0.9


@pytest.mark.long
def test_likelihood_of_the_chosen_holds_high_rates(made: World) -> None:
    high = (*PAIRS, "trainer.lr=1e-3", "trainer.steps=30")
    assert reward(made, "held", *high, "algorithm.preference.nll=1") >= 0.95
    assert reward(made, "free", *high) < 0.2
    signals = made.client.show("free").signals
    assert signals.pair_accuracy is not None and signals.pair_accuracy > 0.9
