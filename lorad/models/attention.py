"""How a phase attends: the one part of the forward that differs between training, prefill and decode."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Attention(Protocol):
    """Called once per layer, after q and k are normalised and rotated.

    q: [batch, time, heads, head_dim]; k, v: [batch, time, kv heads, head_dim]; returns the shape of q.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class CausalAttention:
    """Each token sees itself and what is before it in its own row.

    Rows are right-padded: padding is never seen.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention; shapes as in `Attention`."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Grouped-query attention under a mask that broadcasts to [batch, heads, queries, keys].

    q: [batch, heads, queries, head_dim]; k, v: [batch, kv heads, keys, head_dim]; returns the shape of q. On
    a GPU no fused kernel takes a mask and fewer key heads, and the plain one holds all scores: there the
    heads are repeated.
    """
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and q.device.type == "cuda":
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
