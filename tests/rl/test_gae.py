"""What the goldens leave open about a critic's numbers."""

import math

import numpy as np

from lorad.rl.gae import explained_variance, gae


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
