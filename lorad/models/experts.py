"""A mixture of experts in place of a layer's MLP: each token goes through the few experts that the router
scores highest (Switch Transformers, arXiv 2101.03961; top-k as in Mixtral, arXiv 2401.04088).

Tokens are sorted by expert, all experts are one grouped product, and a token's experts are added in the order
of their scores, whatever else is in the batch.

Routes can be recorded and replayed (R3, Rollout Routing Replay, Ma et al., 2025, arXiv 2510.11370): a trainer
that sends each token to the experts of the rollout differs from the engine by rounding alone, where a router
near a tie would send it elsewhere. The experts are those of the rollout; their weights are the trainer's own
scores of them, so that gradients pass through the router.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.models.base import Base, Experts, Weight
from lorad.models.config import ExpertsConfig
from lorad.models.lora import LoraApply
from lorad.models.ops import apply, clamped_swiglu, swiglu
from lorad.models.products.forms import ends_of, grouped
from lorad.routes import RouteShape

Routing = Callable[[int, Tensor | None, Tensor], Tensor]
"""From (number among the layers with experts, which of the tokens these are, None: all, the experts that the
router chose) to the experts that the tokens are sent to; int64 [tokens, per token], as the choice."""


def mixture(
    x: Tensor,
    experts: Experts,
    config: ExpertsConfig,
    layer: int = 0,
    lora: LoraApply | None = None,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, hidden], with the adapters that `lora` has at
    the experts of this layer.

    Args:
        choose: Maps the experts that the router chose to the ones that are taken; see `Routing`.
    """
    index, weights = _route(x, experts, config, choose)
    order = _Order.by_expert(index)
    flat = index.reshape(-1)
    ends = ends_of(flat, config.count)
    added = lora.routed(layer, order.tokens, ends) if lora and lora.has_experts(layer) else None
    of = flat.index_select(0, order.pairs) if config.is_fused else None

    def linear(name: str, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        y = grouped(x, weight, ends) if added is None else added.product(name, x, weight, ends)
        return y if bias is None or of is None else y + bias.index_select(0, of)

    rows = apply(_Spread, x, order) if x.requires_grad else x.index_select(0, order.tokens)
    y = linear("gate_up", rows, experts.gate_up, experts.gate_up_bias)
    inner = swiglu(y) if config.clamp is None else clamped_swiglu(y, *config.clamp)
    out = linear("down", inner, experts.down, experts.down_bias)
    if out.requires_grad:
        return apply(_WeightedSum, out, weights, order).to(x.dtype)  # type: ignore[no-any-return]
    return _WeightedSum.plain(out, weights, order).to(x.dtype)


class _Order(NamedTuple):
    """How pairs of a token and one of its experts, token by token, are sorted by expert. int64 [pairs]."""

    pairs: Tensor  # the pair of each row
    tokens: Tensor  # the token of each row
    rows: Tensor  # the row of each pair

    @staticmethod
    def by_expert(index: Tensor) -> "_Order":
        """Sort pairs of token and expert by expert. `index` has each token's experts, [tokens, per token]."""
        pairs = torch.argsort(index.reshape(-1), stable=True)
        rows = torch.empty_like(pairs)
        rows[pairs] = torch.arange(len(pairs), device=pairs.device)
        return _Order(pairs, pairs // index.shape[1], rows)


class _Spread(Function):
    """Spreads tokens [tokens, width] to rows that are sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: _Order) -> Tensor:
        ctx.count = len(x)
        ctx.order = order
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.rows).view(ctx.count, -1, grad.shape[-1]).sum(1), None


class _WeightedSum(Function):
    """Sums the rows of each token, which are sorted by expert, times their weights [tokens, per token];
    returns [tokens, width].
    """

    @staticmethod
    def plain(y: Tensor, weights: Tensor, order: _Order) -> Tensor:
        out = y.index_select(0, order.rows).view(*weights.shape, -1)
        out = out.mul_(weights.unsqueeze(-1)) if out.dtype == weights.dtype else out * weights.unsqueeze(-1)
        return out.sum(1)

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: _Order) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.order = order
        return _WeightedSum.plain(y, weights, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, weights = ctx.saved_tensors
        order = ctx.order
        to_weights = None
        grad = grad.index_select(0, order.tokens)
        if ctx.needs_input_grad[1]:
            to_weights = (y * grad).sum(-1).index_select(0, order.rows).view(weights.shape)
        grad.mul_(weights.reshape(-1, 1).index_select(0, order.pairs))
        return grad.to(y.dtype), to_weights, None


def _route(
    x: Tensor, experts: Experts, config: ExpertsConfig, choose: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64, and their weights, in the dtype of x or float32; both are
    [tokens, per token], the highest score first. For `choose` see `mixture`.
    """
    if config.is_sigmoid:
        # as DeepSeek-V3 (arXiv 2412.19437) does, in float32: a bias of each expert counts for the choice, not
        # for the weight, and groups of experts are chosen first, by the sum of their two highest scores
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
    scores = F.linear(x, experts.router, experts.router_bias)
    likely = F.softmax(scores, dim=-1, dtype=torch.float32)
    weights, index = likely.topk(config.per_token)
    if choose is not None:
        index = choose(index)
        weights = likely.gather(1, index)
    if config.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return index, weights if config.is_weighted_in_fp32 else weights.to(x.dtype)


def route_shape(base: Base) -> RouteShape | None:
    """Return the shape of the routes of a base; None where it is no mixture."""
    config = base.config.experts
    if config is None:
        return None
    layers = sum(layer.experts is not None for layer in base.layers)
    return RouteShape(layers, config.count, config.per_token)


class Recording:
    """Notes the routes of one forward pass, and changes none.

    Attributes:
        layers: The experts of its tokens, for each layer that has any, [tokens, per token].
    """

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.layers: list[Tensor] = []

    def __call__(self, layer: int, rows: Tensor | None, own: Tensor) -> Tensor:
        assert rows is None and layer == len(self.layers)
        self.layers.append(own)
        return own

    def routes(self) -> np.ndarray:
        """Return the routes of the pass's flat tokens."""
        return torch.stack(self.layers, 1).cpu().numpy().astype(self.shape.dtype)


class Replay:
    """Sends the tokens of a forward pass where `routes` says, int32 [tokens, layers, per token]; tokens with
    numbers below 0 go where the router sends them. Recomputing a layer changes nothing.
    """

    def __init__(self, routes: Tensor) -> None:
        self.routes = routes
        self.is_known = routes[:, 0, 0] >= 0
        self.differs = torch.zeros_like(self.is_known)
        """bool [tokens]: the router would have sent it to other experts, in any layer."""

    def __call__(self, layer: int, rows: Tensor | None, own: Tensor) -> Tensor:
        every = slice(None) if rows is None else rows
        engine = self.routes[every, layer]
        is_known = self.is_known[every]
        is_other = (engine.sort(-1).values != own.sort(-1).values).any(-1)
        self.differs[every] |= is_known & is_other
        return torch.where(is_known[:, None], engine.to(own.dtype), own)

    def counts(self, tokens: slice = slice(None)) -> tuple[int, int, int]:
        """Return how many tokens were sent where `routes` says, how many of them the router would have sent
        elsewhere, and how many were sent by the router since nothing was known.
        """
        replayed = int(self.is_known[tokens].sum())
        return replayed, int(self.differs[tokens].sum()), self.is_known[tokens].numel() - replayed


def replayed(routes: np.ndarray, device: torch.device) -> Replay:
    """Return what replays an array of routes, see `lorad/routes.py`."""
    largest = np.iinfo(routes.dtype).max
    index = torch.from_numpy(routes.astype(np.int32)).to(device)
    return Replay(torch.where(index == largest, -1, index))
