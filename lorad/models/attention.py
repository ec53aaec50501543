"""How a phase mixes tokens: the one part of the forward that differs between training, prefill and decode."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.delta.net import Net

_WIDER = 8  # numbers, as the kernels of a GPU want heads of a multiple of so many


class Beside(NamedTuple):
    """What a layer's attention has beside queries and keys (gpt-oss, arXiv 2508.10925).

    Attributes:
        sinks: A score of each head that takes part in the softmax, of no key and with the value 0, [heads].
        window: How many tokens a query sees at most, its own among them; 0 for all.
    """

    sinks: Tensor
    window: int

    def near(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether the window of queries at some positions reaches keys at others."""
        return keys > queries - self.window


class Attention(Protocol):
    """What is called once per layer, after q and k are normalised and rotated, and returns the shape of q.
    `recur` is called instead in layers of gated delta nets.

    Args:
        q: Queries, [batch, time, heads, head_dim].
        k, v: Keys and values, [batch, time, kv heads, head_dim].
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None
    ) -> Tensor: ...

    def recur(self, layer: int, net: Net, x: Tensor) -> Tensor:
        """Return what a net makes of its inputs [batch, time, fed]: [batch, time, value heads, value dim]."""
        ...


class CausalAttention:
    """Each token sees itself and what is before it in its own row.

    Rows are right-padded: padding is never seen.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None) -> Tensor:
        return causal(q, k, v, beside)

    def recur(self, layer: int, net: Net, x: Tensor) -> Tensor:
        return net.run(x, net.nothing(x))[0]


def causal(q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None) -> Tensor:
    """Compute causal grouped-query attention; shapes as in `Attention`."""
    if beside is not None:
        places = torch.arange(q.shape[1], device=q.device)
        mask = places <= places[:, None]
        if beside.window:
            mask &= beside.near(places[:, None], places)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return masked(q, k, v, mask[None, None], sinks=beside.sinks).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute grouped-query attention under a mask that broadcasts to [batch, heads, queries, keys].

    On a GPU no fused kernel takes a mask and fewer key heads, and the plain one holds all scores: there the
    heads are repeated.

    Args:
        q: Queries, [batch, heads, queries, head_dim]; the result has their shape.
        k, v: Keys and values, [batch, kv heads, keys, head_dim].
        sinks: See `Beside`; with them the mask is boolean, and has all queries and keys.
    """
    if sinks is not None:
        # For a kernel that knows no sinks: a key more that all queries see, whose product with a query is its
        # head's sink, through a number that all other keys have as 0, and whose value is 0.
        scale = scale or q.shape[-1] ** -0.5
        dim = q.shape[-1]
        q = F.pad(q, (0, _WIDER))
        k = F.pad(k, (0, _WIDER, 0, 1))
        v = F.pad(v, (0, _WIDER, 0, 1))
        q[..., dim] = (sinks / scale)[:, None]
        k[..., -1, dim] = 1
        return masked(q, k, v, F.pad(mask, (0, 1), value=True), scale)[..., :dim]
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and q.device.type == "cuda":
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the shares of keys, the last dimension, in float32, rounded to the dtype of the scores. Sinks,
    which broadcast to one key, have a share beside them, which is left out.
    """
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
    every = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(every, -1, dtype=torch.float32).to(scores.dtype)[..., :-1].contiguous()
