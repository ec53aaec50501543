"""The loss of a critic, token by token. Flat tensors: T completion tokens, in the order of the batch."""

import numpy as np
import torch
from torch import Tensor

from lorad.protocol.batch import LossStats, ValueLoss, ValueTargets


def value_losses(
    values: Tensor, targets: ValueTargets, tokens: slice | np.ndarray, loss: ValueLoss
) -> tuple[Tensor, Tensor]:
    """Return the loss of some tokens, with a gradient, and whether the clip changed it, [t] each.

    It is .5 * max((v - G)^2, (v_old + clip(v - v_old, ±e) - G)^2), as in PPO2 of OpenAI's baselines. The
    values, [t] fp32 with a gradient, are of the tokens of `targets` that `tokens` chooses.
    """

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array[tokens], np.float32)).to(values.device)

    returns = moved(targets.returns)
    free = (values - returns).square()
    larger = free
    clipped = torch.zeros_like(values)
    if loss.clip is not None:
        old = moved(targets.values)
        bound = (old + (values - old).clamp(-loss.clip, loss.clip) - returns).square()
        larger = torch.maximum(free, bound)
        clipped = (bound > free).detach().float()
    weights = torch.ones_like(values) if targets.weights is None else moved(targets.weights)
    return 0.5 * weights * larger, clipped * (weights > 0)


def value_stats(losses: Tensor, clipped: Tensor, normaliser: float) -> LossStats:
    """Return the sums that a trainer reports; see `LossStats`."""
    if not losses.numel():
        return LossStats()
    sums = torch.stack([losses.detach().sum() / normaliser, clipped.sum()]).tolist()
    return LossStats(loss=sums[0], tokens=losses.numel(), clipped=sums[1])
