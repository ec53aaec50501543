"""Losses of preferences: gradients by finite differences, and what is left out of them."""

import numpy as np
import pytest

from lorad.rl.pairs import PreferenceOutcome, label_loss, mismatched_divergence, pair_loss
from lorad.spec.algorithm import Preference

LENGTHS = np.array([3, 2, 4, 1])
CHANCE = np.random.default_rng(0)
LOGPROBS, REFERENCE = -CHANCE.exponential(1.0, 10), -CHANCE.exponential(1.0, 10)
TRAINED = np.array([1, 1, 0, 1, 1, 0, 1, 1, 1, 1])
ALL = [
    Preference(),
    Preference(smoothing=0.2, nll=0.5),
    Preference("sigmoid_norm", beta=0.7),
    Preference("ipo", nll=1.0),
    Preference("apo_zero", beta=0.4),
    Preference("simpo", gamma=0.3),
    Preference("kto", beta=0.3),
]


def judged(wanted: Preference, at: np.ndarray) -> PreferenceOutcome:
    if wanted.loss == "kto":
        desired = np.array([True, False, False, True])
        return label_loss(at, REFERENCE, LENGTHS, desired, wanted, 0.1, TRAINED)
    return pair_loss(at, REFERENCE, LENGTHS, wanted, TRAINED)


@pytest.mark.parametrize("wanted", ALL, ids=str)
def test_gradient_is_that_of_the_loss(wanted: Preference) -> None:
    step = 1e-6
    moves = np.eye(10) * step
    numeric = [
        (judged(wanted, LOGPROBS + move).loss - judged(wanted, LOGPROBS - move).loss) / (2 * step)
        for move in moves
    ]
    found = judged(wanted, LOGPROBS).gradient
    np.testing.assert_allclose(found, numeric, atol=1e-8)
    assert (found[TRAINED == 0] == 0).all() and np.abs(found[TRAINED == 1]).all()


@pytest.mark.parametrize("wanted", ALL, ids=str)
def test_rewards_are_those_of_trl(wanted: Preference) -> None:
    """beta * (logps - ref_logps), of ipo, sigmoid_norm and simpo of means; simpo has no reference."""
    moved = (LOGPROBS - (0 if wanted.loss == "simpo" else REFERENCE)) * TRAINED
    sums, counts = np.add.reduceat(moved, [0, 3, 5, 9]), np.array([2, 2, 3, 1])
    by_hand = sums / counts if wanted.loss in ("ipo", "sigmoid_norm", "simpo") else sums
    np.testing.assert_allclose(judged(wanted, LOGPROBS).rewards, wanted.strength * by_hand)


def test_hinge_leaves_pairs_that_are_apart() -> None:
    apart = REFERENCE + np.repeat([4.0, -4.0, 0.01, 0.0], LENGTHS)
    found = pair_loss(apart, REFERENCE, LENGTHS, Preference("hinge", beta=1.0)).gradient
    assert (found[:5] == 0).all() and (found[5:9] == -0.5).all() and found[9] == 0.5


def test_simpo_reads_no_reference() -> None:
    wanted, nowhere = Preference("simpo"), np.full(10, -9.0)
    here = pair_loss(LOGPROBS, REFERENCE, LENGTHS, wanted)
    there = pair_loss(LOGPROBS, nowhere, LENGTHS, wanted)
    assert here.loss == there.loss and (here.gradient == there.gradient).all()


def test_far_margins_stay_finite() -> None:
    far = np.where(np.repeat([1, 0, 1, 0], LENGTHS) > 0, -1e4, 0.0)
    for wanted in ALL:
        assert np.isfinite(judged(wanted, far).gradient).all()


def test_the_divergence_of_kto_is_never_negative() -> None:
    above = mismatched_divergence(REFERENCE + 0.1, REFERENCE, LENGTHS)
    assert above == pytest.approx(0.25) and mismatched_divergence(REFERENCE - 1, REFERENCE, LENGTHS) == 0
