"""Learning rates by hand."""

from math import cos, pi
from typing import Any

import pytest

from lorad.rl.schedule import learning_rate


def rates(*steps: int, **settings: Any) -> list[float]:
    known = {"lr": 1.0, "schedule": "constant", "horizon": 10, "warmup_steps": 0, "min_lr": 0.0}
    return [learning_rate(step, **{**known, **settings}) for step in steps]


def test_constant_stays() -> None:
    assert rates(0, 9, 100, lr=3e-4) == [3e-4, 3e-4, 3e-4]


def test_warm_up_rises_linearly_to_the_rate() -> None:
    assert rates(0, 1, 2, 3, 4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_the_minimum_and_stays() -> None:
    found = rates(0, 5, 10, 11, schedule="linear", min_lr=0.2)
    assert found == pytest.approx([1.0, 0.2 + 0.8 * 0.5, 0.2, 0.2])


def test_linear_begins_after_the_warm_up() -> None:
    found = rates(1, 2, 6, 10, schedule="linear", warmup_steps=2)
    assert found == pytest.approx([1.0, 1.0, 1 - 4 / 8, 0.0])


def test_cosine_falls_along_half_a_period() -> None:
    found = rates(0, 1, 5, 10, 99, schedule="cosine", min_lr=0.1)
    assert found == pytest.approx([1.0, 0.1 + 0.9 * (1 + cos(pi / 10)) / 2, 0.1 + 0.9 / 2, 0.1, 0.1])


def test_warm_up_of_the_whole_horizon_ends() -> None:
    assert rates(9, 10, 11, schedule="linear", warmup_steps=10) == [1.0, 1.0, 0.0]
