"""What a step journals for `lorad why`: the spread of rewards and lengths, and what is odd in samples."""

from collections.abc import Collection

import numpy as np

from lorad.driver.session import Rollout, Sample, StepSelection
from lorad.protocol.calls import Published

_GRAM = 4  # tokens that are compared at a time
_LEAST = 8  # tokens of the shortest sample that is looked at


def spread_metrics(rollout: Rollout, scored: StepSelection, special_ids: Collection[int]) -> dict[str, float]:
    """Return what was measured of the rewards, lengths and tokens of a step."""
    samples = rollout.samples
    lengths = [sample.size for sample in samples]
    metrics = {
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
        "empty": float(np.mean([not sample.text.strip() for sample in samples])),
    }
    if several := [group for group in rollout.groups if len(group) > 1]:
        kinds = [len({sample.tokens.tobytes() for sample in group}) / len(group) for group in several]
        metrics["distinct"] = float(np.mean(kinds))
    if scored.rewards.size:
        rewards = scored.rewards.astype(np.float64)
        groups = np.split(rewards, np.cumsum(scored.sizes)[:-1])
        metrics |= {"reward_min": float(rewards.min()), "reward_max": float(rewards.max())}
        metrics["reward_best"] = float(np.mean([group.max() for group in groups if group.size]))
    if long := [repetition(sample) for sample in samples if sample.size >= _LEAST]:
        metrics["repetition"] = float(np.mean(long))
    if completions := [sample for sample in samples if sample.episode is None]:
        special = frozenset(special_ids)
        inside = [not special.isdisjoint(sample.tokens[:-1].tolist()) for sample in completions]
        metrics["special_inside"] = float(np.mean(inside))
    return metrics


def repetition(sample: Sample) -> float:
    """Return the share of the runs of four tokens of a sample that stood in it before."""
    tokens = sample.tokens.tolist()
    runs = [*zip(*(tokens[place:] for place in range(_GRAM)), strict=False)]
    return 1.0 - len({*runs}) / len(runs)


def movement(published: Published) -> dict[str, float]:
    """Return how far a version is from others, as the pool measured it."""
    facts = published.attestation.facts
    names = {"policy_change": "signal", "policy_step": "step"}
    metrics = {name: facts[fact] for name, fact in names.items() if fact in facts}
    return metrics if published.norm is None else {**metrics, "adapter_norm": published.norm}
