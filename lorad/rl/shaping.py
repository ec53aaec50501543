"""What is added to a reward before advantages are made of it."""

import numpy as np
from msgspec import Struct

from lorad.spec.model import Spec


class Shaping(Struct, frozen=True):
    """longest: tokens that a sample may have. buffer: the last so many of them cost, up to `penalty` for the
    longest sample; 0 is none. truncated: what a sample costs that was cut off.
    """

    longest: int
    buffer: int = 0
    penalty: float = 1.0
    truncated: float = 0.0


def shaped(rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, shaping: Shaping) -> np.ndarray:
    """float32 [S]. rewards: [S]. lengths: int [S]. truncated: bool [S].

    Soft overlong punishment of DAPO (Yu et al., 2025, arXiv 2503.14476, equation 13).
    """
    found = np.asarray(rewards, np.float64)
    if shaping.buffer:
        over = (lengths - (shaping.longest - shaping.buffer)) / shaping.buffer
        found = found - shaping.penalty * over.clip(0, 1)
    result: np.ndarray = (found - shaping.truncated * truncated).astype(np.float32)
    return result


def shaping_of(spec: Spec) -> Shaping:
    """Return the costs of length that the spec asks for."""
    longest, cost = spec.rollout.max_new_tokens, spec.algorithm.cost_of_length
    truncated = float(spec.algorithm.truncated == "penalise")
    if cost is None:
        return Shaping(longest, truncated=truncated)
    return Shaping(longest, cost.buffer or max(1, longest // 5), cost.penalty, truncated)
