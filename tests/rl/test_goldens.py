"""Losses, gradients and advantages against numbers computed with the code of TRL, verl, SkyRL, prime-rl,
OpenRLHF, ROLL and open-instruct: `tests/data/losses/goldens.json` names the function of each.
"""

import numpy as np
import pytest

from lorad.protocol.batch import PolicyLoss, PolicyTargets
from lorad.rl.pairs import pair_loss
from lorad.spec.algorithm import Preference
from tests.conformance.goldens import (
    ADVANTAGES,
    CASES,
    GAES,
    LENGTHS,
    PAIRS,
    POLICIES,
    advantages_of,
    gae_of,
    given,
    judged,
    loss_and_gradient,
    policy_targets,
    value_loss_and_gradient,
)


@pytest.mark.parametrize("name", POLICIES)
def test_loss_and_gradient_are_the_rivals(name: str) -> None:
    loss, gradient = loss_and_gradient(*policy_targets(name), given("logprob"))
    assert loss == pytest.approx(CASES[name]["loss"], rel=1e-6, abs=2e-7)
    np.testing.assert_allclose(gradient, CASES[name]["grad"], atol=2e-7)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_the_rivals(name: str) -> None:
    np.testing.assert_allclose(advantages_of(name), CASES[name]["advantages"], atol=2e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_preferences_are_the_rivals(name: str) -> None:
    found = judged(name, given("logprob"))
    assert found.loss == pytest.approx(CASES[name]["loss"], rel=1e-9)
    np.testing.assert_allclose(found.gradient, CASES[name]["grad"], atol=1e-12)
    linear, targets = PolicyLoss("linear"), PolicyTargets(-found.gradient)
    np.testing.assert_allclose(
        loss_and_gradient(linear, targets, 1.0, given("logprob"))[1], CASES[name]["grad"], atol=2e-7
    )


def test_ipo_of_sums_is_the_rivals_trap() -> None:
    """OpenRLHF's IPO compares summed log-probabilities, the paper's their means: it is IPO of samples that
    have one token each.
    """
    places = np.repeat(np.arange(LENGTHS.size), LENGTHS)
    sums = [np.bincount(places, given(name)) for name in ("logprob", "reference")]
    found = pair_loss(sums[0], sums[1], np.ones_like(LENGTHS), Preference("ipo"))
    assert found.loss == pytest.approx(CASES["ipo_sum"]["loss"], rel=1e-9)
    np.testing.assert_allclose(found.gradient[places], CASES["ipo_sum"]["grad"], atol=1e-9)


@pytest.mark.parametrize("name", GAES)
def test_advantages_of_a_critic_are_verls(name: str) -> None:
    np.testing.assert_allclose(gae_of(name), CASES[name]["advantages"], atol=1e-7)


def test_value_loss_and_gradient_are_verls() -> None:
    loss, gradient = value_loss_and_gradient()
    assert loss == pytest.approx(CASES["value"]["loss"], rel=1e-6)
    np.testing.assert_allclose(gradient, CASES["value"]["grad"], atol=2e-7)
