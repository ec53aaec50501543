"""A mixture of experts in place of a layer's MLP: each token goes through the few experts that the router
scores highest (Switch Transformers, arXiv 2101.03961; top-k as in Mixtral, arXiv 2401.04088).

Tokens are sorted by expert, all experts are one grouped product, and a token's experts are added in the order
of their scores, whatever else is in the batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.models.base import Experts, Weight
from lorad.models.config import ExpertsConfig
from lorad.models.lora import LoraApply
from lorad.models.ops import apply, swiglu
from lorad.models.packed import Packed


def mixture(
    x: Tensor,
    experts: Experts,
    config: ExpertsConfig,
    layer: int = 0,
    lora: LoraApply | None = None,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[tokens, hidden] to the same: the weighted sum of each token's experts, with adapters where `lora` has
    some at this layer's.

    choose: from the experts that the router chose to those that are taken; see `lorad/models/routes.py`.
    """
    index, weights = _route(x, experts, config, choose)
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = ends_of(flat, config.count)
    tokens = order // config.per_token
    rows = x.index_select(0, tokens)
    added = lora.routed(layer, tokens, ends.tolist()) if lora and lora.has_experts(layer) else None
    y = grouped(rows, experts.gate_up, ends)
    inner = swiglu(y if added is None else added.apply("gate_up", rows, y))
    sorted_out = grouped(inner, experts.down, ends)
    if added is not None:
        sorted_out = added.apply("down", inner, sorted_out)
    home = torch.empty_like(order)
    home[order] = torch.arange(len(order), device=order.device)
    out = sorted_out.index_select(0, home).view(len(x), config.per_token, -1)
    return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _route(
    x: Tensor, experts: Experts, config: ExpertsConfig, choose: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token: (index int64, weight in the dtype of x or float32), both [tokens, per
    token], the highest score first. choose: see `mixture`.
    """
    if config.is_sigmoid:
        return _route_by_sigmoid(x, experts, config, choose)
    scores = F.linear(x, experts.router)
    likely = F.softmax(scores, dim=-1, dtype=torch.float32)
    weights, index = likely.topk(config.per_token)
    if choose is not None:
        index = choose(index)
        weights = likely.gather(1, index)
    if config.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return index, weights if config.is_weighted_in_fp32 else weights.to(x.dtype)


def _route_by_sigmoid(
    x: Tensor, experts: Experts, config: ExpertsConfig, choose: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Route as DeepSeek-V3 (arXiv 2412.19437) does, in float32: a bias of each expert counts for the choice,
    not for the weight, and groups of experts are chosen first, by the sum of their two highest scores.
    """
    scores = F.linear(x.float(), experts.router.float()).sigmoid()
    assert experts.bias is not None
    choice = scores.detach() + experts.bias
    if config.groups_per_token < config.groups:
        grouped = choice.view(len(x), config.groups, -1)
        best = grouped.topk(2)[0].sum(-1).topk(config.groups_per_token)[1]
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(others.unsqueeze(-1), float("-inf")).view(len(x), -1)
    index = choice.topk(config.per_token)[1]
    index = index if choose is None else choose(index)
    weights = scores.gather(1, index)
    if config.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return index, weights * config.scale


def ends_of(flat: Tensor, count: int) -> Tensor:
    """int32 [experts]: where the rows of each expert end."""
    sizes = torch.zeros(count, dtype=torch.int64, device=flat.device)
    return sizes.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).to(torch.int32)


def grouped(x: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """[rows, out]: x [rows, in], sorted by expert, times the transposed weights [experts, out, in].

    ends: of each expert's rows, see `ends_of`. The weights are frozen, and get no gradient.
    """
    return apply(_Grouped, x, weights, ends) if x.requires_grad else _product(x, weights, ends)


class _Grouped(Function):
    """The frozen weights get no gradient, which would be as large as all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Weight, ends: Tensor) -> Tensor:
        ctx.weights = weights
        ctx.save_for_backward(ends)
        return _product(x, weights, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        return _product(grad.contiguous(), ctx.weights, ends, is_backward=True), None, None


def _product(x: Tensor, weights: Weight, ends: Tensor, *, is_backward: bool = False) -> Tensor:
    """x [rows, in] times weights [experts, out, in] transposed; backward, [rows, out] times these. Packed
    experts are dense one after another; all at once in the one product that a GPU has for them.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cuda":
        dense = weights.dense() if isinstance(weights, Packed) else weights
        return F.grouped_mm(x, dense if is_backward else dense.mT, offs=ends)
    y, begin = x.new_empty(len(x), weights.shape[2 if is_backward else 1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            one = weights[expert]
            weight = one.dense() if isinstance(one, Packed) else one
            torch.mm(x[begin:end], weight if is_backward else weight.t(), out=y[begin:end])
        begin = end
    return y
