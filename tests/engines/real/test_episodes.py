"""Episodes of several turns through the real servers: what the model reads is what is trained on."""

from pathlib import Path

import pytest

from lorad.client.shapes import RunDetails
from tests.engines.real.test_whole_run import configure
from tests.kit.world import World, world

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16}
algorithm: {group_size: 4}
data: {train: lookup, prompts_per_step: 8}
env: {name: lookup, turns: 3}
trainer: {lr: 1.5e-3, steps: 4}
rollout: {max_new_tokens: 12}
eval: {every: 4, problems: 32}
checkpoint: {every: 2}
"""
RECIPE = Path(__file__).parents[3] / "examples" / "lookup.yaml"
DELAYED = """
import time

def slow(prompt, completion, answer):
    time.sleep(0.05)
    return float(completion.strip() == answer)
"""


def finished(made: World, name: str, kind: str, spec: str, *overrides: str) -> RunDetails:
    made.lorad("run", made.spec(spec), f"rollout.backend={kind}", *overrides, "--name", name, "--detach")
    return made.completed(name, seconds=3000)


def test_server_reads_what_the_trainer_trains_on(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        finished(made, "looked", kind, SPEC)
        for step in made.client.steps("looked"):
            assert abs(step.metrics["logprob_difference"] or 0.0) < 0.02, step.metrics
        samples = [s for step in (1, 4) for s in made.client.samples("looked", step=step)]
        assert {len(sample.turns) for sample in samples} >= {2, 3}
        for sample in samples:
            assert len(sample.logprobs) == sum(turn.tokens for turn in sample.turns)
        assert "32 episodes of step 4 played again, 0 differ" in made.lorad("replay", "looked").stderr
        assert {version.attested for version in made.client.adapters("looked")} == {"passed"}


@pytest.mark.long
def test_samples_are_scored_while_others_are_sampled(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        (made.root / "slow.py").write_text(DELAYED)
        spec = SPEC.replace("env: {name: lookup, turns: 3}\n", "").replace("lookup", "sort")
        finished(made, "scored", kind, spec, "reward=slow.py:slow", "eval.every=0")
        assert [step.metrics["failed_rewards"] for step in made.client.steps("scored")] == [0.0] * 4


@pytest.mark.long
def test_lookup_is_learnt_through_a_server(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        shown = finished(made, "learns", kind, RECIPE.read_text())
        assert (shown.eval_last or 0.0) >= 0.9, shown
