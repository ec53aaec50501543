"""Products of rows with a frozen weight, in float32 on a CPU in the form that is quickest there.

One product has several forms. Which is quickest differs from shape to shape and from machine to machine, up
to threefold (figures: benchmarks/NOTES.md). A rule that was drawn from measurements names one; a pool
measures on its own machine instead, see lorad/models/products/choices.py. The form depends on the shapes and
on that choice alone, so bits repeat, and trainer and engine compute the same ones.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.box.machine import cpu_facts
from lorad.models.packed import Packed

Form = Literal["torch", "weight_first", "weight_first_even", "onednn", "vector"]

FEW = 4  # rows
_LARGE = 1 << 18  # numbers in a weight that has to come from memory each time
_WORTH = 1 << 22  # multiplications: with fewer, another form's call takes longer than its product saves


class Shape(NamedTuple):
    """What a form is chosen for: x [rows, into] times a weight [out, into] transposed.

    One that `is_turned` lies in memory as [into, out], as in a backward.
    """

    rows: int
    out: int
    into: int
    is_turned: bool


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """Multiply x [rows, in] by the transposed weight [out, in] and add the bias; returns [rows, out],
    contiguous.

    A packed weight is dense during the product alone, and again during its backward.
    """
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    if needs_gradient and (isinstance(weight, Packed) or _form_of(x, weight) != "torch"):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return product(x, dense(weight), bias)


def unrounded(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [rows, in] by the transposed weight [out, in], which is frozen; returns [rows, out].

    On a GPU the product of half precision comes in float32, in which it is added up anyhow: scores of words
    are as large as 30, where bfloat16 has steps of an eighth. Elsewhere it has the dtype of x.
    """
    is_half = x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)
    return _Unrounded.apply(x, weight) if is_half else linear(x, weight)  # type: ignore[no-untyped-call]


def dense(weight: Tensor | Packed) -> Tensor:
    return weight.dense() if isinstance(weight, Packed) else weight


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what `linear` does, by a dense weight and without a gradient to come."""
    return FORMS[_form_of(x, weight)](x, weight, bias)


def _form_of(x: Tensor, weight: Tensor | Packed) -> Form:
    """Choose the form of a product. What is small, or is not float32 on a CPU without gaps, is torch's."""
    rows = len(x)
    numbers = weight.numel()
    if x.dtype != torch.float32 or x.device.type != "cpu" or not rows:
        return "torch"
    if (numbers < _LARGE and rows * numbers < _WORTH) or not (_has_no_gaps(x) and _has_no_gaps(weight)):
        return "torch"
    out, into = weight.shape
    return _chooser(Shape(rows, out, into, not (isinstance(weight, Packed) or weight.is_contiguous())))


def _has_no_gaps(factor: Tensor | Packed) -> bool:
    """Return whether no numbers of a factor have gaps between them, for which oneDNN has but a slow
    reference.
    """
    return isinstance(factor, Packed) or factor.is_contiguous() or factor.t().is_contiguous()


def by_rule(shape: Shape) -> Form:
    """Choose without a measurement.

    Two or four rows are up to three times faster than one or three when the weight comes first, and tall or
    small weights than wide ones. torch gives other products to MKL, which on AMD's CPUs makes no use of
    AVX-512; oneDNN, which torch carries as well, does.
    """
    numbers = shape.out * shape.into
    if shape.rows <= FEW:
        reads_alone = numbers >= _LARGE and (shape.rows <= 2 or shape.out >= shape.into or numbers <= 1 << 20)
        return "weight_first_even" if reads_alone else "torch"
    return "onednn" if shape.rows * numbers >= _WORTH and _leaves_avx512_unused() else "torch"


_chooser: Callable[[Shape], Form] = by_rule


def choose_by(chooser: Callable[[Shape], Form]) -> None:
    """Have `chooser` choose the forms of all products of this process, instead of the rule."""
    global _chooser
    _chooser = chooser


def forms_of(rows: int) -> list[Form]:
    """Return the forms that a product of so many rows may have in this process."""
    left_out = {"onednn": not has_onednn(), "vector": rows != 1}
    return [form for form in FORMS if not left_out.get(form)]


@cache
def _leaves_avx512_unused() -> bool:
    """Return whether MKL leaves AVX-512 unused where oneDNN would not."""
    is_amd = cpu_facts().get("vendor_id") == "AuthenticAMD"
    return is_amd and has_onednn() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_onednn() -> bool:
    """Return whether this torch has oneDNN's product as an operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _weight_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def _weight_first_even(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Make an odd number of rows even: one row takes longer than two."""
    rows = len(x)
    even = torch.cat([x, x[:1]]) if rows % 2 else x
    y = torch.mm(weight, even.t()).t()[:rows].contiguous()
    return y if bias is None else y.add_(bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Have oneDNN compute, for some more rows than the product needs if there are many: it compiles a
    program for each number of rows, in half a millisecond, and keeps it, in half a MiB.
    """
    rows = len(x)
    kernel = torch.ops.mkldnn._linear_pointwise
    more = -rows % max(8, (1 << rows.bit_length()) >> 5) if rows > FEW else 0  # of many a sixteenth at most
    y: Tensor = kernel(torch.cat([x, x[:more]]) if more else x, weight, bias, "none", [], "")
    return y.resize_(rows, len(weight)) if more else y  # a view could not be written into


def _vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply a weight and one row. Raises RuntimeError for more rows."""
    y = torch.mv(weight, x.reshape(-1))[None]
    return y if bias is None else y.add_(bias)


FORMS: Mapping[Form, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "torch": F.linear,
    "weight_first": _weight_first,
    "weight_first_even": _weight_first_even,
    "onednn": _onednn,
    "vector": _vector,
}


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return product(x, dense(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return product(grad, dense(ctx.weight).t()), None, None


class _Unrounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.weight.dtype) @ ctx.weight, None


def grouped(x: Tensor, weights: Tensor | Packed, ends: Tensor) -> Tensor:
    """Multiply x [rows, in], sorted by expert, by the transposed weights [experts, out, in]; returns
    [rows, out].

    The rows of each expert end at `ends`, int32 [experts]. The weights are frozen, and get no gradient.
    """
    if not x.requires_grad:
        return grouped_plainly(x, weights, ends)
    return _Grouped.apply(x, weights, ends)  # type: ignore[no-any-return, no-untyped-call]


def ends_of(flat: Tensor, count: int) -> Tensor:
    """Return where the rows of each expert end, int32 [experts]."""
    sizes = torch.zeros(count, dtype=torch.int64, device=flat.device)
    return sizes.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).to(torch.int32)


class _Grouped(Function):
    """A grouped product by frozen weights, whose gradient would be as large as all experts."""

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
    """Multiply x [rows, in] by the transposed weights [experts, out, in]; in a backward, x [rows, out] by the
    weights as they are.

    Packed experts are dense one after another; all at once in the one product that a GPU has for them.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cuda":
        whole = dense(weights)
        return F.grouped_mm(x, whole if is_backward else whole.mT, offs=ends)
    y = x.new_empty(len(x), weights.shape[2 if is_backward else 1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            weight = dense(weights[expert])
            y[begin:end] = product(x[begin:end], weight.t() if is_backward else weight)
        begin = end
    return y
