"""Group-relative advantages of GRPO (Shao et al., 2024, DeepSeekMath, section 4.1)."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

_EPSILON = 1e-4


def group_advantages(
    rewards: np.ndarray, group_sizes: np.ndarray, kind: Literal["std", "mean"] = "std"
) -> np.ndarray:
    """float32 [S]: how much better each sample is than its group. rewards: [S]; group_sizes: [G], sums to S.

    "std": (r - mean) / (std + 1e-4) with the *sample* standard deviation (n - 1); the paper does not say
    which, this and the epsilon are those of TRL's GRPOTrainer. "mean": r - mean (Liu et al., 2025, Dr. GRPO).
    Equal rewards, and a group of one, give exactly 0. Raises ValueError for rewards that are not finite.
    """
    advantages = np.zeros(len(rewards), np.float64)
    for start, group in _groups(rewards, group_sizes):
        if group.size and np.ptp(group) > 0:
            centred = group - group.mean()
            scale = group.std(ddof=1) + _EPSILON if kind == "std" else 1.0
            advantages[start : start + group.size] = centred / scale
    return advantages.astype(np.float32)


def zero_variance(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """bool [G]: the groups whose rewards are all equal, which teach nothing."""
    return np.array(
        [group.size == 0 or np.ptp(group) == 0 for _, group in _groups(rewards, group_sizes)], np.bool_
    )


def _groups(rewards: np.ndarray, group_sizes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(start, rewards as float64) of each group."""
    values = np.asarray(rewards, np.float64)
    if int(np.sum(group_sizes)) != values.size:
        raise ValueError(f"group_sizes sum to {int(np.sum(group_sizes))} but there are {values.size} rewards")
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite")
    start = 0
    for size in np.asarray(group_sizes).tolist():
        yield start, values[start : start + size]
        start += size
