"""AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) over flat vectors,
and the norm that clipping looks at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorad.trainers.base import Optimizer

NORMED_AT_ONCE = 2**18
"""A CPU adds up squares in a few fp32 lanes: over 2**27 of them the norm is off by up to 2 %, over so many by
4e-5.
"""


@torch.no_grad()
def adamw(
    weights: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    optimizer: Optimizer,
) -> None:
    """Step number `step` (from 1), in place; the arithmetic and its order are those of torch.optim.AdamW."""
    beta1, beta2 = optimizer.betas
    weights.mul_(1 - lr * optimizer.weight_decay)
    exp_avg.lerp_(grads, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(optimizer.eps)
    weights.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def l2_norm(flat: Tensor) -> float:
    """Return the norm of the norms of its parts."""
    norms = [torch.linalg.vector_norm(part) for part in flat.split(NORMED_AT_ONCE)]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
