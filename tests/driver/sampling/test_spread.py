"""What a step journals of how its rewards, lengths and texts are spread."""

from typing import Any

import numpy as np
import pytest

from lorad.driver.rewards import Scoring
from lorad.driver.sampling.spread import repetition, spread_metrics
from lorad.driver.session import Plan, Rollout, Sample, StepSelection
from lorad.rl.data import Example

EXAMPLE = Example("a/1/0", "S:21=", "12", [1, 2], {})


def sample(tokens: list[int], text: str = "12") -> Sample:
    ids = np.array(tokens, np.int32)
    return Sample(EXAMPLE, 0, "a@1", ids, np.zeros(ids.size, np.float32), "stop", text)


def measured(groups: list[list[Sample]], rewards: list[float], sizes: list[int]) -> dict[str, float]:
    plan = Plan(0, [EXAMPLE] * len(groups), 0, 1, 0)
    counts = (list(range(len(groups))), len(groups), len(groups), 9, 1.0, 0.0)
    nothing: Any = np.zeros(0)
    scored = StepSelection(
        [], nothing, np.array(rewards, np.float32), nothing, np.array(sizes), nothing, nothing, nothing
    )
    return spread_metrics(Rollout(plan, groups, *counts, Scoring.of([])), scored, [7])


def test_rewards_lengths_and_texts_of_a_step() -> None:
    groups = [[sample([3, 4, 1]), sample([3, 4, 1])], [sample([7, 1], " "), sample([5, 6, 3, 1])]]
    found = measured(groups, [0.0, 1.0, 0.25], [2, 1])  # the reward of one failed
    assert found == {
        "response_length_min": 2.0, "response_length_max": 4.0, "empty": 0.25, "distinct": 0.75,
        "reward_min": 0.0, "reward_max": 1.0, "reward_best": 0.625, "special_inside": 0.25,
    }  # fmt: skip


def test_the_last_token_may_be_special() -> None:
    assert measured([[sample([3, 7])]], [1.0], [1])["special_inside"] == 0.0


def test_a_step_without_rewards_has_none() -> None:
    assert not {"reward_min", "reward_best"} & measured([[sample([3, 1])]], [], [0]).keys()


@pytest.mark.parametrize(
    ("tokens", "share"), [([3] * 12, 8 / 9), (list(range(12)), 0.0), ([1, 2, 3, 4] * 2, 1 / 5)]
)
def test_repetition_is_what_stood_there_before(tokens: list[int], share: float) -> None:
    assert repetition(sample(tokens)) == pytest.approx(share)
