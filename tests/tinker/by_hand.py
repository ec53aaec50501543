"""Tinker's losses by hand, for one datum, each with its derivative by the log-probabilities."""

import numpy as np

CLIP = (0.8, 1.2)
BETA = 0.05


def by_hand(
    name: str, p: np.ndarray, q: np.ndarray, a: np.ndarray, mask: np.ndarray
) -> tuple[float, np.ndarray]:
    """(loss, its derivative by each p). a: advantages, of cross_entropy the weights."""
    ratio = np.exp(p - q)
    if name == "cross_entropy":
        return -(p * a).sum(), -a
    if name == "importance_sampling":
        return -(ratio * a).sum(), -ratio * a
    if name == "dro":
        return -(p * a - 0.5 * BETA * (p - q) ** 2).sum(), -(a - BETA * (p - q))
    if name == "gspo":
        ratio = np.full_like(p, np.exp((p - q)[mask > 0].mean()) if mask.any() else 1.0)
    held = np.clip(ratio, *CLIP)
    if name == "cispo":
        return -(held * p * a).sum(), -held * a
    return -np.minimum(ratio * a, held * a).sum(), np.where(ratio * a <= held * a, -ratio * a, 0.0)
