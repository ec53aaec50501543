"""Advantages, against numbers worked out by hand."""

import numpy as np
import pytest

from lorad.rl.advantage import advantages, zero_variance


def test_std_advantages_are_centred_and_scaled() -> None:
    # group 1: mean 0.5, deviations +-0.5, sample variance 4 * 0.25 / 3, std 0.5773503
    # group 2: mean 2, sample variance (1 + 1) / 1, std 1.4142136
    found = advantages(np.array([1, 0, 0, 1, 3, 1.0]), np.array([4, 2]))
    assert found.dtype == np.float32
    one, two = 0.5 / (0.5773503 + 1e-4), 1 / (1.4142136 + 1e-4)
    np.testing.assert_allclose(found, [one, -one, -one, one, two, -two], rtol=1e-6)
    np.testing.assert_allclose(
        found, [0.86587546, -0.86587546, -0.86587546, 0.86587546, 0.70705678, -0.70705678]
    )


def test_mean_advantages_are_only_centred() -> None:
    found = advantages(np.array([1, 0, 0, 0, 5, 3.0]), np.array([4, 2]), scale="one")
    np.testing.assert_array_equal(found, np.array([0.75, -0.25, -0.25, -0.25, 1, -1], np.float32))


@pytest.mark.parametrize("kind", ["std", "one"])
def test_equal_rewards_or_single_samples_give_zero(kind: str) -> None:
    rewards = np.array([0.1, 0.1, 0.1, 7.0])
    found = advantages(rewards, np.array([3, 1]), scale=kind)  # type: ignore[arg-type]
    assert found.tolist() == [0, 0, 0, 0]


def test_groups_of_equal_rewards_are_flagged() -> None:
    flags = zero_variance(np.array([1, 1, 0, 1, 0.5, 0]), np.array([2, 2, 1, 1]))
    assert flags.tolist() == [True, False, True, True]
    assert zero_variance(np.array([]), np.array([0])).tolist() == [True]


def test_one_group_does_not_touch_another() -> None:
    first = advantages(np.array([0, 1, 1.0]), np.array([3]))
    both = advantages(np.array([0, 1, 1, 100, -50.0]), np.array([3, 2]))
    np.testing.assert_array_equal(both[:3], first)


def test_agrees_with_torchs_std_as_trl_takes_it() -> None:
    torch = pytest.importorskip("torch")
    rewards = np.random.default_rng(0).random((5, 8)).astype(np.float32)
    groups = torch.from_numpy(rewards)
    theirs = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ours = advantages(rewards.reshape(-1), np.full(5, 8))
    np.testing.assert_allclose(ours, theirs.reshape(-1).numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages(np.array([0.0, bad]), np.array([2]))


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 3 but there are 2"):
        zero_variance(np.zeros(2), np.array([3]))
