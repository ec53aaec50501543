"""AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) over flat vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from lorad.trainers.base import Optimizer


@torch.no_grad()
def adamw(
    weights: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, lr: float, optimizer: Optimizer
) -> None:
    """Step number `step` (from 1), in place; the arithmetic and its order are those of torch.optim.AdamW."""
    beta1, beta2 = optimizer.betas
    weights.mul_(1 - lr * optimizer.weight_decay)
    exp_avg.lerp_(grads, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(optimizer.eps)
    weights.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
