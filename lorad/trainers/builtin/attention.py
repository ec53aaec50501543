"""Attention over packed rows, in the blocks of a `Layout`, its backward written by hand; and what gated delta
nets do with them.

Forward and backward gather; what several sequences add to one prompt is added in their order, so bits repeat
as those of the products do. No sequence's numbers reach another's, not even as 0 x NaN.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.models.attention import Beside, masked, softmax
from lorad.models.delta.net import Net, State
from lorad.models.ops import apply, recomputed
from lorad.trainers.builtin.blocks import Block, Layout


class PackedAttention:
    """An `Attention` for q, k, v of [1, rows, heads, head_dim]."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None) -> Tensor:
        return apply(_Attend, q, k, v, self.layout, beside)  # type: ignore[no-any-return]

    def recur(self, layer: int, net: Net, x: Tensor) -> Tensor:
        return recomputed(partial(_follow, self.layout, net), x, x, ())


def _follow(layout: Layout, net: Net, x: Tensor) -> Tensor:
    """Run a net over packed rows, level by level: a run begins with the state of the one that it shares.

    Nothing of it is kept for a backward, which would be many times its inputs and outputs.
    """
    above: State | None = None
    states: list[State] = []
    outs = []
    level = 0
    for block in layout.blocks:
        assert block.cells is not None
        if block.level > level:
            above = State(*(torch.cat(parts) for parts in zip(*states, strict=True)))
            states = []
            level = block.level
        fed = x[0].index_select(0, block.cells.view(-1)).view(*block.cells.shape, -1)
        begin = net.nothing(fed)
        if above is not None:
            assert block.sharers is not None
            begin = State(*(part.index_select(0, block.sharers) for part in above))
        out, state = net.run(fed, begin, block.lengths)
        outs.append(out.flatten(0, 1))
        if level + 1 < len(layout.levels):
            states.append(state)
    assert layout.places is not None
    return torch.cat(outs).index_select(0, layout.places)[None]


class _Products(NamedTuple):
    """What the backward of two batched products needs: q [S * kv, heads / kv * Q, dim], k and v [S * kv, K,
    dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor

    @classmethod
    def forward(
        cls, block: Block, scale: float, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None
    ) -> "tuple[Tensor, _Products]":
        bias = block.seen(beside)
        sinks = None
        assert bias is not None
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
        if beside is not None:  # the frozen sinks get no gradient; what they take away is in the shares
            kv = len(q) // block.shape[0]
            queries = block.shape[2]
            each = beside.sinks.view(kv, -1, 1).expand(-1, -1, queries).reshape(kv, -1, 1)
            sinks = each.repeat(block.shape[0], 1, 1)
        weights = softmax(scores, sinks)
        return torch.bmm(weights, v), cls(q, k, v, weights)

    def backward(self, scale: float, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_weights = torch.bmm(grad, self.v.transpose(1, 2))
        to_scores = torch.ops.aten._softmax_backward_data(to_weights, self.weights, -1, self.weights.dtype)
        return (
            torch.baddbmm(self.q, to_scores, self.k, beta=0, alpha=scale),
            torch.baddbmm(self.k, to_scores.transpose(1, 2), self.q, beta=0, alpha=scale),
            torch.bmm(self.weights.transpose(1, 2), grad),
        )


class _Fused(NamedTuple):
    """The graph of the fused kernel, for long sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    @classmethod
    def forward(
        cls, block: Block, scale: float, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None
    ) -> "tuple[Tensor, _Fused]":
        sequences, _, queries, _ = block.shape
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        heads = q.view(sequences, -1, queries, q.shape[-1])
        keys, values = (t.view(sequences, -1, *t.shape[1:]) for t in (k, v))
        if (bias := block.seen(beside)) is not None:
            out = masked(heads, keys, values, bias, scale, None if beside is None else beside.sinks)
        else:
            gqa = q.shape[1] != queries
            out = F.scaled_dot_product_attention(
                heads, keys, values, is_causal=True, scale=scale, enable_gqa=gqa
            )
        out = out.reshape(q.shape)
        return out.detach(), cls(q, k, v, out)

    def backward(self, scale: float, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.autograd.grad(self.out, (self.q, self.k, self.v), grad)
        return q, k, v


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, beside: Beside | None) -> Tensor:
        keep = any(ctx.needs_input_grad)
        flat = [t.reshape(-1, layout.dim) for t in (q, k, v)]
        ctx.layout = layout
        ctx.blocks = []
        outs = []
        for block in layout.blocks:
            kind = _Fused if block.fused else _Products
            with torch.set_grad_enabled(keep and block.fused):
                batch = block.shape[0] * layout.kv
                places = (block.queries, block.keys, block.keys)
                queries, keys, values = (
                    t.index_select(0, of).view(batch, -1, layout.dim)
                    for t, of in zip(flat, places, strict=True)
                )
                out, kept = kind.forward(block, layout.dim**-0.5, queries, keys, values, beside)
            outs.append(out.view(-1, layout.dim))
            ctx.blocks.append(kept if keep else None)
        return torch.cat(outs).index_select(0, layout.out).view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        layout: Layout = ctx.layout
        grad = grad.reshape(-1, layout.dim)
        gradients = []
        for block, kept in zip(layout.blocks, ctx.blocks, strict=True):
            to_out = grad.index_select(0, block.queries).view(
                block.shape[0], layout.kv, -1, block.shape[2], layout.dim
            )
            if block.live is not None:
                to_out.mul_(block.live)
            gradients.append(kept.backward(layout.dim**-0.5, to_out.view(kept.q.shape)))
        ctx.blocks.clear()
        q, k, v = (list(parts) for parts in zip(*gradients, strict=True))
        for parts in (k, v):
            _add_shares(layout, parts)
        rows = (1, -1, layout.heads, layout.dim), (1, -1, layout.kv, layout.dim)
        return (
            _home(q, layout.out).view(rows[0]),
            _home(k, layout.home).view(rows[1]),
            _home(v, layout.home).view(rows[1]),
            None,
            None,
        )


def _add_shares(layout: Layout, parts: list[Tensor]) -> None:
    """Add to the gradients of shared keys what all the sequences that share them have, from the last level
    up: what a completion has of the stem comes to the stem with what its prompt has of it.
    """
    total: Tensor | None = None
    for level in range(len(layout.levels) - 1, -1, -1):
        above = None
        if level:
            count, most = layout.levels[level - 1]
            above = parts[0].new_zeros((count, layout.kv, most, layout.dim), dtype=torch.float32)
        done = 0
        for block, part in zip(layout.blocks, parts, strict=True):
            if block.level != level:
                continue
            count, prefix, _, keys = block.shape
            cells = part.view(count, layout.kv, keys, layout.dim)
            if total is not None and block.is_shared:
                cells.add_(total[done : done + count, :, :keys])
            done += count
            if above is not None and block.sharers is not None:
                shares = cells[:, :, :prefix].to(above.dtype)
                prompts = above[:, :, :prefix]
                if prompts.is_cuda:  # both kernels add one after another, without atomics
                    prompts.index_put_((block.sharers,), shares, accumulate=True)
                else:
                    prompts.index_add_(0, block.sharers, shares)
        total = above


def _home(parts: list[Tensor], index: Tensor) -> Tensor:
    """Pick each row's cells out of the cells of all blocks."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).index_select(0, index)
