"""What is taken from a reward before advantages are made of it."""

import numpy as np

from lorad.spec.model import Spec


def shaped(spec: Spec, rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """float32 [S]. rewards: [S]. lengths: int [S], tokens. truncated: bool [S], whether it was cut off.

    algorithm.overlong is the soft overlong punishment of DAPO (Yu et al., 2025, arXiv 2503.14476, equation
    13), and algorithm.truncated `penalise` takes 1.
    """
    found = np.asarray(rewards, np.float64)
    longest, cost = spec.rollout.max_new_tokens, spec.algorithm.cost_of_length
    if cost is not None:
        buffer = cost.buffer or max(1, longest // 5)
        found = found - cost.penalty * ((lengths - (longest - buffer)) / buffer).clip(0, 1)
    result: np.ndarray = (found - truncated * (spec.algorithm.truncated == "penalise")).astype(np.float32)
    return result
