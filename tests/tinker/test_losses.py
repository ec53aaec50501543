"""Tinker's losses agree with those by hand, whose derivatives agree with finite differences."""

import numpy as np
import pytest

from lorad.tinker.losses import NEEDS, check, policy_of, value
from tests.tinker.by_hand import by_hand

LENGTHS = np.array([4, 1, 6])
_STEP = 1e-6


def drawn(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(log-probabilities, checked inputs of the loss), all exact in float32."""
    rng = np.random.default_rng(len(name))
    size = int(LENGTHS.sum())
    mask = (rng.random(size) < 0.7).astype(np.float32)
    made: dict[str, np.ndarray] = {
        "weights": rng.normal(size=size) * mask,
        "logprobs": rng.normal(-2, 0.5, size),
        "advantages": rng.normal(size=size) * mask,
        "sequence_ratio_mask": mask,
    }
    given = {key: made[key].astype(np.float32) for key in NEEDS[name]}
    p = given["logprobs"] + rng.normal(0, 0.4, size) if "logprobs" in given else rng.normal(-2, 1, size)
    return p.astype(np.float32).astype(np.float64), check(name, {}, given, size)


def summed(name: str, p: np.ndarray, given: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    ones = np.ones(p.size)
    q, mask = given.get("logprobs", ones), given.get("sequence_ratio_mask", ones)
    weights = given.get("weights", given.get("advantages", ones))
    ends = np.cumsum(LENGTHS)[:-1]
    columns = (np.split(column.astype(np.float64), ends) for column in (p, q, weights, mask))
    values, slopes = zip(*(by_hand(name, *datum) for datum in zip(*columns, strict=True)), strict=True)
    return sum(values), np.concatenate(slopes)


@pytest.mark.parametrize("name", NEEDS)
def test_values_are_those_by_hand(name: str) -> None:
    p, given = drawn(name)
    assert value(name, {}, p, given, LENGTHS) == pytest.approx(summed(name, p, given)[0], rel=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_derivatives_are_finite_differences(name: str) -> None:
    """Without the losses that stop a gradient."""
    p, given = drawn(name)
    ends = [
        [value(name, {}, p + way * _STEP * one, given, LENGTHS) for way in (1, -1)] for one in np.eye(p.size)
    ]
    differences = [(above - below) / (2 * _STEP) for above, below in ends]
    np.testing.assert_allclose(differences, summed(name, p, given)[1], atol=1e-6)


def test_bounds_of_ppo_are_bounds() -> None:
    loss, _ = policy_of("ppo", {"clip_high_threshold": 1.5}, drawn("ppo")[1])
    assert (1 - loss.clip_low, 1 + loss.clip_high) == (0.8, 1.5)


@pytest.mark.parametrize(
    ("name", "settings", "change", "words"),
    [
        ("stable_reinforce", {}, {}, "not supported"),
        ("ppo", {"beta": 0.1}, {}, "has no beta"),
        ("ppo", {"clip_low_threshold": 1.3}, {}, "above clip_high_threshold"),
        ("dro", {"beta": np.nan}, {}, "not finite"),
        ("ppo", {}, {"weights": np.ones(2)}, "would change nothing"),
        ("ppo", {}, {"advantages": np.ones(3)}, "a number for each of 2 tokens"),
        ("ppo", {}, {"advantages": np.array([1, np.inf])}, "not finite"),
        ("gspo", {}, {"sequence_ratio_mask": np.array([0.5, 1])}, "0 or 1"),
        ("gspo", {}, {"sequence_ratio_mask": np.array([0, 1])}, "must have the advantage 0"),
    ],
)
def test_wrong_inputs_are_refused(
    name: str, settings: dict[str, float], change: dict[str, np.ndarray], words: str
) -> None:
    given = {key: np.ones(2) for key in ("target_tokens", *NEEDS.get(name, ()))} | change
    with pytest.raises(ValueError, match=words):
        check(name, settings, given, 2)
