"""What the slots of every trainer compute alike: how A begins, AdamW (Loshchilov & Hutter, 2019,
arXiv 1711.05101) over flat vectors, and the norm that clipping looks at.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lorad.errors import AdapterRefused
from lorad.protocol.batch import Optimizer

_NORMAL_STD = 0.2
# a CPU adds squares in a few fp32 lanes: over 2**27 numbers the norm is off by 2 %, here 4e-5
_NORMED_AT_ONCE = 2**18

Spans = Sequence[tuple[slice, bool]]  # the runs that a flat vector is made of, and whether each is of B


def initial_a(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw A of shape [rank, in], fp32 on the CPU, from `generator`.

    The kind kaiming is kaiming_uniform(a=sqrt(5)), that is U(-b, b) with b = 1 / sqrt(in), PEFT's default.
    The kinds xavier, normal (std 0.2) and zero are Megatron-Bridge's; xavier is N(0, 2 / (in + rank)). Raises
    AdapterRefused for another kind.
    """
    rank, into = shape
    if kind == "kaiming":
        return torch.empty(shape).uniform_(-(into**-0.5), into**-0.5, generator=generator)
    stds = {"xavier": (2 / (into + rank)) ** 0.5, "normal": _NORMAL_STD, "zero": 0.0}
    if kind not in stds:
        raise AdapterRefused(f"no init {kind!r} of A", hint=f"choose one of kaiming, {', '.join(stds)}")
    return torch.empty(shape).normal_(0, stds[kind], generator=generator)


def spans_of(sizes: Iterable[tuple[int, bool]], begin: int, end: int) -> Spans:
    """Cut the numbers from `begin` to `end` of a flat vector into runs of A and B, which count from `begin`.

    sizes: How many numbers each parameter of the vector has, in order, and whether it is a B.
    """
    spans: list[tuple[slice, bool]] = []
    start = -begin
    for size, is_b in sizes:
        first = max(start, 0)
        last = min(start + size, end - begin)
        start += size
        if last > first:
            if spans and spans[-1][1] == is_b:
                first = spans.pop()[0].start
            spans.append((slice(first, last), is_b))
    return spans


@torch.no_grad()
def adamw(
    weights: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    optimizer: Optimizer,
    spans: Spans,
) -> None:
    """Make step number `step` (from 1) in place, with torch.optim.AdamW's arithmetic in its order.

    With a ratio of rates A and B are two parameter groups.
    """
    beta1, beta2 = optimizer.betas
    for span, is_b in [(slice(None), False)] if optimizer.loraplus_lr_ratio == 1 else spans:
        rate = lr * optimizer.loraplus_lr_ratio if is_b else lr
        mine, grad, average, square = (flat[span] for flat in (weights, grads, exp_avg, exp_avg_sq))
        mine.mul_(1 - rate * optimizer.weight_decay)
        average.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(optimizer.eps)
        mine.addcdiv_(average, denominator, value=-rate / (1 - beta1**step))


def l2_norm(flat: Tensor) -> float:
    """Return the norm of a vector, as the norm of the norms of its parts."""
    norms = [torch.linalg.vector_norm(part) for part in flat.split(_NORMED_AT_ONCE)]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
