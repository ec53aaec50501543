"""What each token's loss counts, and what their sum is divided by. S samples, T completion tokens.

The normaliser is that of the whole (mini-)batch, whatever micro-batches and ranks it is cut into. Tokens that
are not trained leave the sum and the normaliser; samples whose advantage is 0 stay in the normaliser.
"""

import numpy as np

from lorad.spec.algorithm import Level


def level_weights(
    lengths: np.ndarray, level: Level, groups: np.ndarray, trained: np.ndarray | None = None
) -> np.ndarray:
    """Return the weight of each token, float32 [T].

    A token that is trained weighs 1 at the levels token, constant and sum, at sequence 1 / trained tokens of
    the sample (GRPO), and at prompt 1 / trained tokens of all samples of the prompt; any other weighs 0.

    lengths: The tokens of each sample, int [S].
    groups: The samples of each prompt, int [G].
    trained: Which tokens are trained, bool [T]; None where all are.
    """
    mask = np.ones(int(lengths.sum()), np.float64) if trained is None else trained.astype(np.float64)
    owner = np.repeat(np.arange(lengths.size), lengths)
    if level == "prompt":
        owner = np.repeat(np.arange(groups.size), groups)[owner]
    if level in ("sequence", "prompt"):
        counts = np.bincount(owner, mask, minlength=1)
        mask = mask / np.maximum(counts, 1)[owner]
    return mask.astype(np.float32)


def normaliser(
    lengths: np.ndarray, level: Level, groups: np.ndarray, trained: np.ndarray | None = None, length: int = 0
) -> float:
    """Return what the sum of the weighted token losses is divided by; 0 where nothing is trained.

    At the level token it is the trained tokens (DAPO), at sequence the samples that have any (GRPO), at
    prompt the prompts that have any, at constant samples times `length`, the most tokens that a sample may
    have (Liu et al., 2025, Dr. GRPO, arXiv 2503.20783), and at sum 1.
    """
    mask = np.ones(int(lengths.sum()), bool) if trained is None else trained.astype(bool)
    owner = np.repeat(np.arange(lengths.size), lengths)[mask]
    if level == "token":
        return float(mask.sum())
    if level == "sequence":
        return float(np.count_nonzero(np.bincount(owner)))
    if level == "prompt":
        return float(np.count_nonzero(np.bincount(np.repeat(np.arange(groups.size), groups)[owner])))
    return float(lengths.size * length) if level == "constant" else 1.0
