"""Weights for the mismatch of trainer and engine: one of them samples, the other makes the gradient.

They multiply the advantages: each surrogate of `lorad/rl/loss.py` but `dro` and `geometric` is homogeneous in
the advantage, so a weight c >= 0 of its loss is a weight of the advantage. The KL term is not weighed.
"""

import numpy as np

from lorad.spec.algorithm import CorrectionKind


def correction(
    old: np.ndarray,
    sampler: np.ndarray,
    lengths: np.ndarray,
    kind: CorrectionKind,
    low: float = 0.0,
    high: float = 2.0,
) -> np.ndarray:
    """Return the weight of each token by rho = exp(old - sampler), float64 [T].

    Kinds that begin with token take the rho of the token, kinds with sequence its product over the sample,
    and geometric_mask its geometric mean. Kinds that end with truncate bound it by `high` (TIS; Yao et al.,
    2025), and kinds with mask make it 0 outside of [low, high] (IcePop; MIS, Liu et al., 2025);
    geometric_mask makes it 1 inside.

    old, sampler: The log-probabilities of trainer and engine, [T].
    lengths: The tokens of each sample, int [S].
    """
    difference = np.asarray(old, np.float64) - sampler
    if not kind.startswith("token"):
        owner = np.repeat(np.arange(lengths.size), lengths)
        sums = np.bincount(owner, difference, minlength=lengths.size)
        difference = (sums / lengths if kind.startswith("geometric") else sums)[owner]
    weights: np.ndarray = np.exp(difference)
    if kind.endswith("truncate"):
        return weights.clip(low, high)
    inside = (weights >= low) & (weights <= high)
    weights = np.ones_like(weights) if kind == "geometric_mask" else weights
    return np.where(inside, weights, 0.0)
