"""Generalised advantage estimation, token by token. S samples, T completion tokens. Computed in float64."""

import numpy as np

_EPSILON = 1e-8


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    gamma: float = 1.0,
    lam: float = 0.95,
    trained: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns), float64 [T] each (Schulman et al., 2016, arXiv 1506.02438).

    rewards: [T], of each token. values: [T], read at the position that predicts the token; after the last
    token of a sample the value is 0, also where the sample was cut off. lengths: int [S]. trained: bool [T];
    None: all are.

    A token that is not trained is stepped over: no reward, no value, no decay. Its own advantage is that of
    the token after it, and nothing uses it.
    """
    advantages = np.zeros(len(values), np.float64)
    mask = np.ones(len(values), bool) if trained is None else np.asarray(trained, bool)
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    end = 0
    for length in np.asarray(lengths).tolist():
        start, end = end, end + length
        after = following = 0.0
        for token in range(end - 1, start - 1, -1):
            if mask[token]:
                delta = rewards[token] + gamma * following - values[token]
                after, following = delta + gamma * lam * after, values[token]
            advantages[token] = after
    return advantages, advantages + values


def whitened(advantages: np.ndarray, trained: np.ndarray | None = None) -> np.ndarray:
    """float64 [T]: mean 0 and standard deviation 1 over the trained tokens; 0 at the others.

    Fewer than two trained tokens give 0.
    """
    mask = np.ones(len(advantages), bool) if trained is None else np.asarray(trained, bool)
    some = np.asarray(advantages, np.float64)[mask]
    found = np.zeros(len(advantages), np.float64)
    if some.size > 1:
        found[mask] = (some - some.mean()) / np.sqrt(some.var(ddof=1) + _EPSILON)
    return found


def explained_variance(values: np.ndarray, returns: np.ndarray, trained: np.ndarray | None = None) -> float:
    """1 - var(returns - values) / var(returns) over the trained tokens; NaN where all returns are equal."""
    mask = np.ones(len(values), bool) if trained is None else np.asarray(trained, bool)
    wanted = np.asarray(returns, np.float64)[mask]
    missed = wanted - np.asarray(values, np.float64)[mask]
    if not wanted.size or np.ptp(wanted) == 0:
        return float("nan")
    return float(1 - missed.var() / wanted.var())
