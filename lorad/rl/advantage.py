"""Advantages: how much better a sample did than was to be expected. S samples in groups, one for each prompt.

Computed in float64.
"""

from collections.abc import Iterator

import numpy as np

from lorad.spec.algorithm import Baseline, Scale
from lorad.spec.model import Spec

_EPSILON = 1e-4


def shaped(spec: Spec, rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """Return the rewards of samples, less what their lengths cost and what being truncated does, float32 [S].

    algorithm.overlong is the soft overlong punishment of DAPO (Yu et al., 2025, arXiv 2503.14476, equation
    13), and algorithm.truncated `penalise` takes 1.
    """
    shaped = np.asarray(rewards, np.float64)
    longest = spec.rollout.max_new_tokens
    cost = spec.algorithm.cost_of_length
    if cost is not None:
        buffer = cost.buffer or max(1, longest // 5)
        shaped = shaped - cost.penalty * ((lengths - (longest - buffer)) / buffer).clip(0, 1)
    result: np.ndarray = (shaped - truncated * (spec.algorithm.truncated == "penalise")).astype(np.float32)
    return result


def advantages(
    rewards: np.ndarray,
    group_sizes: np.ndarray,
    baseline: Baseline = "group",
    scale: Scale = "std",
    lengths: np.ndarray | None = None,
    epsilon: float = _EPSILON,
) -> np.ndarray:
    """Return the advantage of each sample, float32 [S].

    With a baseline, equal rewards and a group of one give exactly 0 before they are whitened. Raises
    ValueError for rewards that are not finite.

    rewards: The reward of each sample, [S].
    group_sizes: How many samples each group has, int [G]; they sum to S.
    lengths: The trained tokens of each sample, int [S]; None where all are equal.
    baseline: group is r - mean (GRPO, Shao et al., 2024); loo is r - mean of the others (RLOO, Ahmadian
        et al., 2024, arXiv 2402.14740); length is r - the mean by tokens (OPO, Hao et al., 2025, arXiv
        2505.23585); zero is r (REINFORCE).
    scale: std divides by the sample standard deviation (n - 1) of the group, batch_std of all rewards,
        both plus epsilon, 1e-4 as in TRL's GRPOTrainer; mean divides by the group's mean, where that is
        positive (MaxRL); whiten subtracts the mean and divides by the standard deviation over all tokens
        (REINFORCE++, Hu et al., 2025, arXiv 2501.03262); one is Dr. GRPO (Liu et al., 2025).
    """
    result = np.zeros(len(rewards), np.float64)
    tokens = np.ones(len(rewards), np.float64) if lengths is None else np.asarray(lengths, np.float64)
    for start, group in _groups(rewards, group_sizes):
        if group.size == 0 or (baseline != "zero" and np.ptp(group) == 0):
            continue
        part = slice(start, start + group.size)
        mean = group.mean()
        if baseline == "loo":
            centred = (group - mean) * group.size / (group.size - 1)
        else:
            by_tokens = (group * tokens[part]).sum() / tokens[part].sum()
            centred = group - {"group": mean, "length": by_tokens, "zero": 0.0}[baseline]
        if scale == "std" and np.ptp(group) > 0:
            centred = centred / (group.std(ddof=1) + epsilon)
        if scale == "mean":
            centred = centred / (mean + epsilon) if mean > 0 else np.zeros(group.size)
        result[part] = centred
    if scale == "batch_std" and len(rewards) > 1:
        result /= np.asarray(rewards, np.float64).std(ddof=1) + epsilon
    if scale == "whiten" and len(rewards):
        result = whiten(result, tokens)
    return result.astype(np.float32)


def whiten(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Subtract the mean and divide by the standard deviation, in float64; each value has a count."""
    counts = np.ones(values.size) if counts is None else counts
    total = counts.sum()
    mean = (values * counts).sum() / total
    variance = (counts * (values - mean) ** 2).sum() / max(total - 1, 1)
    whitened: np.ndarray = (values - mean) / np.sqrt(variance + 1e-8)
    return whitened


def returns_to_go(rewards: np.ndarray, penalty: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return for each token its sample's reward less the penalties from that token on, float64 [T]."""
    sums = np.cumsum(penalty, dtype=np.float64)
    ends = sums[np.cumsum(lengths) - 1]
    returns: np.ndarray = np.repeat(rewards - ends, lengths) + sums - penalty
    return returns


def zero_variance(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """Return which groups have equal rewards, and so teach nothing; bool [G]."""
    return np.array(
        [group.size == 0 or np.ptp(group) == 0 for _, group in _groups(rewards, group_sizes)], np.bool_
    )


def best_of(
    rewards: np.ndarray, group_sizes: np.ndarray, best: int | None, least: float | None
) -> np.ndarray:
    """Return which samples to imitate, bool [S]: the `best` of each group with a reward of at least `least`,
    of equal ones the first (RFT, Yuan et al., 2023, arXiv 2308.01825; best-of-n).

    Without `least`, `best` is 1 if it is None, and a group whose rewards are all equal has none; with
    `least`, None is all.
    """
    kept = np.zeros(len(rewards), np.bool_)
    for start, group in _groups(rewards, group_sizes):
        order = np.argsort(-group, kind="stable")
        if least is None:
            chosen = order[: best or 1] if group.size and np.ptp(group) > 0 else order[:0]
        else:
            chosen = order[group[order] >= least][:best]
        kept[start + chosen] = True
    return kept


def _groups(rewards: np.ndarray, group_sizes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield where each group starts, and its rewards as float64. Raises ValueError."""
    values = np.asarray(rewards, np.float64)
    if int(np.sum(group_sizes)) != values.size:
        raise ValueError(f"group_sizes sum to {int(np.sum(group_sizes))} but there are {values.size} rewards")
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite")
    start = 0
    for size in np.asarray(group_sizes).tolist():
        yield start, values[start : start + size]
        start += size
