"""Advantages: how much better a sample did than was to be expected. S samples in groups, one for each prompt.

Computed in float64.
"""

from collections.abc import Iterator

import numpy as np

from lorad.spec.algorithm import Baseline, Scale

_EPSILON = 1e-4


def advantages(
    rewards: np.ndarray,
    group_sizes: np.ndarray,
    baseline: Baseline = "group",
    scale: Scale = "std",
    lengths: np.ndarray | None = None,
    epsilon: float = _EPSILON,
) -> np.ndarray:
    """float32 [S]. rewards: [S]. group_sizes: int [G], sums to S. lengths: int [S], of the samples in trained
    tokens; None: equal.

    baseline: group is r - mean (GRPO, Shao et al., 2024); loo is r - mean of the others (RLOO, Ahmadian et
        al., 2024, arXiv 2402.14740); length is r - the mean by tokens (OPO, Hao et al., 2025, arXiv
        2505.23585); zero is r (REINFORCE).
    scale: std divides by the group's sample standard deviation (n - 1), batch_std by that of all rewards,
        both plus epsilon, 1e-4 as in TRL's GRPOTrainer; mean divides by the group's mean, where that is
        positive (MaxRL); whiten subtracts the mean and divides by the standard deviation over all tokens
        (REINFORCE++, Hu et al., 2025, arXiv 2501.03262); one is Dr. GRPO (Liu et al., 2025).

    With a baseline, equal rewards and a group of one give exactly 0 before they are whitened. Raises
    ValueError for rewards that are not finite.
    """
    found = np.zeros(len(rewards), np.float64)
    tokens = np.ones(len(rewards), np.float64) if lengths is None else np.asarray(lengths, np.float64)
    for start, group in _groups(rewards, group_sizes):
        part = slice(start, start + group.size)
        found[part] = _in_group(group, tokens[part], baseline, scale, epsilon)
    if scale == "batch_std" and len(rewards) > 1:
        found /= np.asarray(rewards, np.float64).std(ddof=1) + epsilon
    if scale == "whiten" and len(rewards):
        total = tokens.sum()
        mean = (found * tokens).sum() / total
        variance = (tokens * (found - mean) ** 2).sum() / max(total - 1, 1)
        found = (found - mean) / np.sqrt(variance + 1e-8)
    return found.astype(np.float32)


def _in_group(
    group: np.ndarray, tokens: np.ndarray, baseline: Baseline, scale: Scale, epsilon: float
) -> np.ndarray:
    if group.size == 0 or (baseline != "zero" and np.ptp(group) == 0):
        return np.zeros(group.size)
    mean = group.mean()
    if baseline == "loo":
        found = (group - mean) * group.size / (group.size - 1)
    else:
        found = (
            group - {"group": mean, "length": (group * tokens).sum() / tokens.sum(), "zero": 0.0}[baseline]
        )
    if scale == "std" and np.ptp(group) > 0:
        found = found / (group.std(ddof=1) + epsilon)
    if scale == "mean":
        found = found / (mean + epsilon) if mean > 0 else np.zeros(group.size)
    result: np.ndarray = found
    return result


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
