"""An agent of the OpenAI Agents SDK, as it is published, plays the episodes of a run.

LORAD_AGENTS_PYTHON names an interpreter that has it; without it the test is skipped.
"""

import os

import pytest

from tests.end_to_end.learning.test_calculator import calling_world, tuned
from tests.kit.world import REPOSITORY

VARIABLE = "LORAD_AGENTS_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
EXAMPLE = REPOSITORY / "examples" / "agents_sdk.yaml"


@pytest.mark.skipif(
    not PYTHON, reason=f"{VARIABLE} names no interpreter; docs/testing.md says how to make one"
)
def test_agents_of_the_sdk_are_trained() -> None:
    with calling_world() as made:
        env = (f"env.name={EXAMPLE.with_suffix('.py')}:run", f"env.python={PYTHON}", "env.workers=2")
        made.lorad("run", EXAMPLE, *tuned(made), *env, "--name", "agents", "--wait")
        samples = [sample for step in (1, 2) for sample in made.client.samples("agents", step=step)]
        assert {sample.error or "" for sample in samples} == {""}
        assert max(sample.reward or 0.0 for sample in samples) == 1.0
        called = [s for s in samples if len(s.turns) > 1 and s.turns[0].finish == "stop"]
        assert called and all(sample.rows == 1 for sample in called)
        assert any("submitted" in sample.turns[0].observation for sample in called)
        for sample in samples:
            assert len(sample.logprobs) == sum(turn.tokens for turn in sample.turns)
        for step in made.client.steps("agents"):
            assert step.metrics["logprob_difference"] == pytest.approx(0, abs=1e-3)
            assert step.metrics["failed_rewards"] == 0
