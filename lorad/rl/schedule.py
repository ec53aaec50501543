"""The learning rate of a step, as a pure function: nothing to save, nothing to restore."""

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    lr: float,
    schedule: Literal["constant", "linear", "cosine"],
    horizon: int,
    warmup_steps: int,
    min_lr: float,
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Warm-up rises linearly from lr / warmup_steps (step 0) to lr (step warmup_steps - 1). Then `constant`
    stays; `linear` and `cosine` (SGDR, arXiv 1608.03983, one period) fall from lr at step `warmup_steps` to
    min_lr at step `horizon`, and stay there.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / max(1, horizon - warmup_steps))
    remaining = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_lr + (lr - min_lr) * remaining
