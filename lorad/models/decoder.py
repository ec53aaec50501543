"""The forward of the families in `lorad.models.families`, fused: same numbers as transformers', fewer and
larger calls.

What a family has or lacks (biases, q and k norms, tied embeddings, experts) is in the tensors of `Layer`:
None is left out. A layer mixes tokens by attention, or by a gated delta net where `Layer.delta` is one. Not
computed: dropout, sliding windows without sinks, quantized checkpoints (see `lorad.models.config`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lorad.models.attention import Attention, Beside
from lorad.models.base import Base, Layer, Weight
from lorad.models.delta.net import Net
from lorad.models.experts import Routing, mixture
from lorad.models.lora import LoraApply
from lorad.models.ops import QKNorm, Rope, rms_norm, split_rotate, swiglu
from lorad.models.products.forms import linear, unrounded

LayerForward = Callable[[torch.Tensor], torch.Tensor]
"""One layer: [tokens, hidden] to the same."""


class First(NamedTuple):
    """What enters the first layer: the projections of q, k and v are computed once for tokens that are alike,
    as only their rotation depends on positions.

    Attributes:
        ids: The different tokens, int64 [V].
        of: Which of `ids` each token is, int64 [tokens].
        lora: What the `lora` of `hidden` is on the rows of `ids`.
    """

    ids: torch.Tensor
    of: torch.Tensor
    lora: LoraApply | None


class Last(NamedTuple):
    """What leaves the last layer: all that follows its attention is computed for no other rows.

    Attributes:
        rows: The numbers of these rows among the flat tokens, int64 [U].
        lora: What the `lora` of `hidden` is on these rows.
    """

    rows: torch.Tensor
    lora: LoraApply | None


class Ends(NamedTuple):
    """Where only some rows are computed, see `First` and `Last`; None where all are."""

    first: First | None = None
    last: Last | None = None


_EVERY = Ends()


def at_once(layer: LayerForward, x: torch.Tensor) -> torch.Tensor:
    """Run a layer plainly, without recomputation."""
    return layer(x)


def hidden(
    base: Base,
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: Attention,
    lora: LoraApply | None = None,
    run: Callable[[LayerForward, torch.Tensor], torch.Tensor] = at_once,
    ends: Ends = _EVERY,
    routing: Routing | None = None,
) -> torch.Tensor:
    """Return the normalised last hidden state, [batch, time, hidden], or [U, hidden] of the rows of
    `ends.last`.

    It is differentiable with respect to what `lora` adds; the base itself never requires grad.

    Args:
        ids: The tokens, int64 [batch, time].
        positions: Their positions, int64 [batch, time] or [time], below `max_position_embeddings`.
        run: Runs each layer on its input.
        routing: Decides which experts tokens are sent to.
    """
    rope = Rope(base.cos[positions].unsqueeze(-2), base.sin[positions].unsqueeze(-2))
    # two dimensions throughout: matmul folds more slowly than we do
    x = F.embedding(ids.reshape(-1), base.embed)
    first, last = ends
    mixtures = 0
    for index, layer in enumerate(base.layers):

        def forward(
            x: torch.Tensor, index: int = index, layer: Layer = layer, mixtures: int = mixtures
        ) -> torch.Tensor:
            if first is not None and index == 0:
                words = F.embedding(first.ids, base.embed)
                qkv = _project(base, index, layer, words, first.lora).index_select(0, first.of)
            else:
                qkv = _project(base, index, layer, x, lora)
            mix = _attend if layer.delta is None else _recur
            seen = mix(base, index, layer, qkv, ids.shape, rope, attention)
            then = lora
            rows = None
            if last is not None and index == len(base.layers) - 1:
                rows = last.rows
                then = last.lora
                x = x.index_select(0, rows)
                seen = seen.index_select(0, rows)
            x = x + _linear(seen, layer.o, layer.o_bias, index, "o", then)
            choose = None if routing is None else partial(routing, mixtures, rows)
            return x + _feed_forward(base, index, layer, x, then, choose)

        x = run(forward, x)
        mixtures += layer.experts is not None
    x = rms_norm(x, base.norm, base.config.rms_norm_eps)
    return x if last is not None else x.view(*ids.shape, -1)


def logits(base: Base, states: torch.Tensor, lora: LoraApply | None = None) -> torch.Tensor:
    """Return the scores [..., vocab] of states [..., hidden], as `unrounded` has them; where an adapter adds
    to them, in the dtype of the base.

    Select the positions first: a non-contiguous slice is copied before the matmul.
    """
    rows = states.reshape(-1, states.shape[-1]).contiguous()
    place = len(base.layers), "lm_head"
    if lora is None or not lora.reaches(*place):
        scores = unrounded(rows, base.head)
    else:
        scores = _linear(rows, base.head, None, *place, lora)
    return scores.view(*states.shape[:-1], -1)


def _project(base: Base, index: int, layer: Layer, x: torch.Tensor, lora: LoraApply | None) -> torch.Tensor:
    """Return q, k and v before norm and rotation, [tokens, (heads + 2 kv heads) * head_dim], or what a gated
    delta net has of them.
    """
    normed = rms_norm(x, layer.input_norm, base.config.rms_norm_eps)
    return _linear(normed, layer.qkv, layer.qkv_bias, index, "qkv", lora)


def _attend(
    base: Base,
    index: int,
    layer: Layer,
    qkv: torch.Tensor,
    shape: torch.Size,
    rope: Rope,
    attention: Attention,
) -> torch.Tensor:
    """Return what the heads saw, before the output projection; [tokens, heads * head_dim]."""
    config = base.config
    heads = config.num_attention_heads
    kv = config.num_key_value_heads
    dim = config.head_dim
    norm = None
    if layer.qk_norm is not None:
        norm = QKNorm(layer.qk_norm, config.rms_norm_eps, heads if config.norms_all_heads else 0)
    beside = None if layer.sinks is None else Beside(layer.sinks, config.windows[index])
    gate = None
    if config.delta is not None:  # each head's gate follows its q
        q, kv_rows = qkv.split([2 * heads * dim, 2 * kv * dim], -1)
        q, gate = q.view(-1, heads, 2, dim).unbind(2)
        qkv = torch.cat([q, kv_rows.view(-1, 2 * kv, dim)], 1)
    rotated = split_rotate(qkv.view(*shape, heads + 2 * kv, dim), heads, norm, rope)
    out = attention(index, *rotated, beside).reshape(-1, heads * dim)
    return out if gate is None else out * torch.sigmoid(gate.reshape(out.shape))


def _recur(
    base: Base,
    index: int,
    layer: Layer,
    qkv: torch.Tensor,
    shape: torch.Size,
    rope: Rope,
    attention: Attention,
) -> torch.Tensor:
    """Return what the heads of a gated delta net made of it, before the output projection."""
    assert base.config.delta is not None and layer.delta is not None
    net = Net(base.config.delta, layer.delta, base.config.rms_norm_eps)
    if layer.delta.order is not None:
        qkv = qkv.index_select(-1, layer.delta.order)
    fed, z = qkv.view(*shape, -1).tensor_split([net.fed], -1)
    return net.gated(attention.recur(index, net, fed), z).view(len(qkv), -1)


def _feed_forward(
    base: Base,
    index: int,
    layer: Layer,
    x: torch.Tensor,
    lora: LoraApply | None,
    choose: LayerForward | None,
) -> torch.Tensor:
    normed = rms_norm(x, layer.post_norm, base.config.rms_norm_eps)
    experts = layer.experts
    if experts is not None:
        assert base.config.experts is not None
        out = mixture(normed, experts, base.config.experts, index, lora, choose)
        if experts.shared_down is None:
            return out
        assert experts.shared_gate_up is not None
        gate_up = _linear(normed, experts.shared_gate_up, None, index, "shared.gate_up", lora)
        shared = _linear(swiglu(gate_up), experts.shared_down, None, index, "shared.down", lora)
        if experts.shared_gate is not None:
            shared = torch.sigmoid(F.linear(normed, experts.shared_gate)) * shared
        return out + shared
    assert layer.gate_up is not None and layer.down is not None
    gate_up = _linear(normed, layer.gate_up, layer.gate_up_bias, index, "gate_up", lora)
    return _linear(swiglu(gate_up), layer.down, layer.down_bias, index, "down", lora)


def _linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    layer: int,
    group: str,
    lora: LoraApply | None,
) -> torch.Tensor:
    y = linear(x, weight, bias)
    return y if lora is None else lora.apply(layer, group, x, y)
