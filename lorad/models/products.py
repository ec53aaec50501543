"""Products of rows with the frozen weights of a base, which get no gradient.

A float32 product has the kernel that is quickest on this machine. torch gives it to MKL, which on a CPU that
is not Intel's makes no use of AVX-512; oneDNN, which torch carries as well, does, and takes less than half
the time there (figures: tests/benchmarks/NOTES.md). Which kernel it is depends on the machine and the shapes
alone, so that bits repeat.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.models.ops import apply
from lorad.models.packed import Packed

FEW, _LARGE = 4, 1 << 18  # rows; numbers in a weight that has to come from memory each time
_WORTH = 1 << 22  # multiplications: with fewer, oneDNN's call takes longer than its product saves
_Kernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias: contiguous [rows, out].

    A packed weight is dense during the product alone, and again during its backward.
    """
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    if needs_gradient and (isinstance(weight, Packed) or _quick(x, weight) is not None):
        return apply(_Linear, x, weight, bias)  # type: ignore[no-any-return]
    return product(x, weight, bias)


def product(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """Return what `linear` does; neither has to be contiguous. torch's own kernel alone takes a gradient."""
    dense = weight.dense() if isinstance(weight, Packed) else weight
    if (kernel := _quick(x, dense)) is not None:
        return _aligned(kernel, x, dense, bias)
    if len(x) <= FEW and dense.numel() >= _LARGE and _reads_alone(x):
        y = _few_rows(x, dense)
        return y if bias is None else y.add_(bias)
    return F.linear(x, dense, bias)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.weight.dense() if isinstance(ctx.weight, Packed) else ctx.weight
        return product(grad, weight.t()), None, None


def _quick(x: Tensor, weight: Tensor | Packed) -> _Kernel | None:
    """Return the kernel that is quicker than torch's own choice; None where that is none."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or len(x) <= FEW:
        return None
    is_worth = len(x) * weight.numel() >= _WORTH and _is_dense(x) and _is_dense(weight)
    return _onednn() if is_worth else None


def _aligned(kernel: _Kernel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product, by way of a few rows more than it needs: oneDNN compiles a program for each number
    of rows, in half a millisecond, and keeps it, in half a MiB.
    """
    rows = len(x)
    more = -rows % max(8, (1 << rows.bit_length()) >> 5)  # of many rows at most a sixteenth
    y = kernel(torch.cat([x, x[:more]]) if more else x, weight, bias)
    return y.resize_(rows, len(weight)) if more else y  # a view could not be written into


def _is_dense(factor: Tensor | Packed) -> bool:
    """Return whether numbers lie without gaps: for others oneDNN has but a slow reference."""
    return isinstance(factor, Packed) or factor.is_contiguous() or factor.t().is_contiguous()


@cache
def _onednn() -> _Kernel | None:
    """Return oneDNN's product where MKL leaves AVX-512 unused; None elsewhere."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    cpu, kernel = Path("/proc/cpuinfo"), getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if kernel is None or not cpu.exists() or "AuthenticAMD" not in cpu.read_text():
        return None
    return lambda x, weight, bias: kernel(x, weight, bias, "none", [], "")


def _reads_alone(x: Tensor) -> bool:
    """Return whether `_few_rows` may compute: float32 on a CPU, and no gradient to come."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()


def _few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """One to four float32 rows on a CPU: two or four of them are up to three times faster than one or three,
    and tall or small weights than wide ones, when the weight comes first (figures:
    tests/benchmarks/NOTES.md).
    """
    rows, (out, into) = len(x), weight.shape
    even, is_first = torch.cat([x, x[:1]]) if rows % 2 else x, out >= into or weight.numel() <= 1 << 20
    y = torch.mm(weight, even.t()).t() if is_first or rows <= 2 else F.linear(even, weight)
    return y[:rows].contiguous()


def grouped(x: Tensor, weights: Tensor | Packed, ends: Tensor) -> Tensor:
    """[rows, out]: x [rows, in], sorted by expert, times the transposed weights [experts, out, in].

    ends: where the rows of each expert end, int32 [experts]. The weights are frozen, and get no gradient.
    """
    return apply(_Grouped, x, weights, ends) if x.requires_grad else grouped_plainly(x, weights, ends)


class _Grouped(Function):
    """The frozen weights get no gradient, which would be as large as all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | Packed, ends: Tensor) -> Tensor:
        ctx.weights = weights
        ctx.save_for_backward(ends)
        return grouped_plainly(x, weights, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        return grouped_plainly(grad.contiguous(), ctx.weights, ends, is_backward=True), None, None


def grouped_plainly(
    x: Tensor, weights: Tensor | Packed, ends: Tensor, *, is_backward: bool = False
) -> Tensor:
    """x [rows, in] times weights [experts, out, in] transposed; backward, [rows, out] times these. Packed
    experts are dense one after another; all at once in the one product that a GPU has for them.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cuda":
        dense = weights.dense() if isinstance(weights, Packed) else weights
        return F.grouped_mm(x, dense if is_backward else dense.mT, offs=ends)
    y, begin = x.new_empty(len(x), weights.shape[2 if is_backward else 1]), 0
    is_bound_by_memory = not is_backward and weights.numel() >= _LARGE and _reads_alone(x)
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            one, rows = weights[expert], x[begin:end]
            weight = one.dense() if isinstance(one, Packed) else one
            weight = weight.t() if is_backward else weight
            if is_bound_by_memory and end - begin <= FEW:
                y[begin:end] = _few_rows(rows, weight)
            elif (kernel := _quick(rows, weight)) is not None:
                y[begin:end] = _aligned(kernel, rows, weight, None)
            else:
                torch.mm(rows, weight.t(), out=y[begin:end])
        begin = end
    return y
