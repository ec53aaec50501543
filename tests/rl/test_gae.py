"""What the goldens leave open about a critic's numbers."""

import math

import numpy as np

from lorad.rl.gae import explained_variance, gae, whitened


def test_whitening_leaves_masked_tokens_out() -> None:
    trained = np.array([True, True, False, True])
    found = whitened(np.array([1.0, 2.0, 1e6, 3.0]), trained)
    np.testing.assert_allclose(found, [-1.0, 0.0, 0.0, 1.0], atol=1e-6)


def test_one_trained_token_whitens_to_zero() -> None:
    assert whitened(np.array([5.0])).tolist() == [0.0]


def test_samples_do_not_see_each_other() -> None:
    alone, _ = gae(np.array([0.0, 1.0]), np.array([0.5, 0.2]), np.array([2]))
    both, _ = gae(np.array([0.0, 1.0, 9.0]), np.array([0.5, 0.2, 7.0]), np.array([2, 1]))
    assert both[:2].tolist() == alone.tolist()


def test_explained_variance_of_good_and_bad_critics() -> None:
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full(3, 0.7), returns) == 0
    assert explained_variance(-returns, returns) < 0
    assert math.isnan(explained_variance(returns, np.ones(3)))
