"""Weights and normalisers by hand: three samples of two prompts, [1, 2 | 3] tokens."""

import numpy as np
import pytest

from lorad.rl.levels import level_weights, normaliser
from lorad.spec.algorithm import Level

LENGTHS, GROUPS = np.array([1, 2, 3]), np.array([2, 1])
TRAINED = np.array([0, 1, 1, 1, 0, 1], bool)  # nothing of the first sample


@pytest.mark.parametrize(
    ("level", "weights", "total"),
    [
        ("token", [1, 1, 1, 1, 1, 1], 6),
        ("sequence", [1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], 3),
        ("prompt", [1 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3], 2),
        ("constant", [1, 1, 1, 1, 1, 1], 3 * 8),
        ("sum", [1, 1, 1, 1, 1, 1], 1),
    ],
)
def test_level_decides_weights_and_normaliser(level: Level, weights: list[float], total: float) -> None:
    assert level_weights(LENGTHS, level, GROUPS).tolist() == pytest.approx(weights)
    assert normaliser(LENGTHS, level, GROUPS, length=8) == total


@pytest.mark.parametrize(
    ("level", "weights", "total"),
    [
        ("token", [0, 1, 1, 1, 0, 1], 4),
        ("sequence", [0, 1 / 2, 1 / 2, 1 / 2, 0, 1 / 2], 2),
        ("prompt", [0, 1 / 2, 1 / 2, 1 / 2, 0, 1 / 2], 2),
    ],
)
def test_untrained_tokens_leave_sum_and_normaliser(level: Level, weights: list[float], total: float) -> None:
    assert level_weights(LENGTHS, level, GROUPS, TRAINED).tolist() == pytest.approx(weights)
    assert normaliser(LENGTHS, level, GROUPS, TRAINED) == total
    nothing = np.zeros(6, bool)
    assert normaliser(LENGTHS, level, GROUPS, nothing) == 0
    assert not level_weights(LENGTHS, level, GROUPS, nothing).any()
