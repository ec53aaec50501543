"""Generalised advantage estimation, token by token. S samples, T completion tokens. Computed in float64."""

import numpy as np


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    gamma: float = 1.0,
    lam: float = 0.95,
    trained: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns, float64 [T] each (Schulman et al., 2016, arXiv 1506.02438).

    A token that is not trained is stepped over: no reward, no value, no decay. Its own advantage is the one
    of the token after it, and nothing uses it.

    rewards: The reward of each token, [T].
    values: The value at the position that predicts the token, [T]; after the last token of a sample it is
        0, also where the sample was cut off.
    lengths: The tokens of each sample, int [S].
    trained: Which tokens are trained, bool [T]; None where all are.
    """
    advantages = np.zeros(len(values), np.float64)
    mask = np.ones(len(values), bool) if trained is None else np.asarray(trained, bool)
    rewards = np.asarray(rewards, np.float64)
    values = np.asarray(values, np.float64)
    end = 0
    for length in np.asarray(lengths).tolist():
        start = end
        end += length
        after = following = 0.0
        for token in range(end - 1, start - 1, -1):
            if mask[token]:
                delta = rewards[token] + gamma * following - values[token]
                after = delta + gamma * lam * after
                following = values[token]
            advantages[token] = after
    return advantages, advantages + values


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Return 1 - var(returns - values) / var(returns); NaN where all returns are equal."""
    targets = np.asarray(returns, np.float64)
    missed = targets - np.asarray(values, np.float64)
    if not targets.size or np.ptp(targets) == 0:
        return float("nan")
    return float(1 - missed.var() / targets.var())
