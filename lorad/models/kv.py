"""Keys and values of sequences being decoded, and states of gated delta nets: one slot per sequence, each
with its own length; the rest is masked.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lorad.models.attention import Beside, causal, masked, softmax
from lorad.models.base import Base
from lorad.models.delta.net import Net, State
from lorad.models.delta.states import States

_Seen = tuple[torch.Tensor, torch.Tensor]
"""What queries see, in their shape, and the logsumexp of the scores, float32 [..., 1]."""


_EVEN = 16
_WHOLE = 8  # the fused kernel takes heads of a multiple of so many numbers
_FEW = 64
_LONG = 512
"""A GPU's fused kernel waits where rows times kv heads are at most so many and keys at least so many: 8 rows
of 4,096 tokens take 173 us a layer, two products 77 (H100)."""


def bytes_per_token(base: Base) -> int:
    """Return the bytes of one token's keys and values in all layers of attention."""
    config = base.config
    return 2 * len(config.attentions) * config.num_key_value_heads * config.head_dim * base.dtype.itemsize


def even(length: int) -> int:
    """Round a length up, so that kernels of a GPU take rows of so many scores without copying them first."""
    return -(-length // _EVEN) * _EVEN


class Before(NamedTuple):
    """What rows see before the cache.

    Attributes:
        seen: Returns it, for a layer, q [rows, kv heads, heads of each, head_dim] and what the layer has
            beside, without sinks.
        is_alone: Which rows see nothing there, whatever `seen` says, bool [rows, 1, 1, 1].
    """

    seen: Callable[[int, torch.Tensor, Beside | None], _Seen]
    is_alone: torch.Tensor


class KVCache:
    """Keys and values, for each layer of attention [k and v, slots, kv heads, length, head_dim], and the
    states of the other layers.

    Masked values must be finite, since 0 x NaN is NaN: the cache begins as zeros, and who leaves NaN in a
    slot wipes it. States are whole wherever they are read.

    Attributes:
        numbers: Where each layer of attention is in `layers`.
    """

    def __init__(self, base: Base, slots: int, length: int) -> None:
        config = base.config
        self.numbers = {layer: number for number, layer in enumerate(config.attentions)}
        self.states = States(base, slots)
        self.shape = (2, slots, config.num_key_value_heads, length, config.head_dim)
        self.layers = [torch.zeros(self.shape, dtype=base.dtype, device=base.device) for _ in self.numbers]

    def of(self, layer: int) -> torch.Tensor:
        return self.layers[self.numbers[layer]]

    @property
    def slots(self) -> int:
        return self.shape[1]

    @property
    def length(self) -> int:
        return self.shape[3]

    def resize(self, slots: int, length: int, used: int) -> None:
        """Make room for so much, keeping the first `used` slots; layer by layer, so that the peak is one
        layer more.
        """
        if (slots, length) == (self.slots, self.length):
            return
        kept = min(length, self.length)
        shape = (2, slots, self.shape[2], length, self.shape[4])
        for index, layer in enumerate(self.layers):
            resized = layer.new_zeros(shape)
            resized[:, :used, :, :kept] = layer[:, :used, :, :kept]
            self.layers[index] = resized
        if slots != self.slots:
            self.states.resize(slots, used)
        self.shape = shape

    def wipe(self, slots: Iterable[int]) -> None:
        """Fill these slots with zeros."""
        for slot in slots:
            for layer in self.layers:
                layer[:, slot].zero_()

    def move(self, sources: torch.Tensor, targets: torch.Tensor, span: int) -> None:
        """Copy the first `span` tokens of slots `sources` over the first tokens of `targets`, both int64."""
        for layer in self.layers:
            layer[:, targets, :, :span] = layer[:, sources, :, :span]
        self.states.move(sources, targets)

    def fill(self, slots: slice | torch.Tensor, other: "KVCache", rows: torch.Tensor, skip: int = 0) -> None:
        """Make slots copies of the slots `rows` (int64) of another, without its first `skip` tokens: one
        prompt, many samples.
        """
        span = min(self.length, other.length - skip)
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer[:, slots, :, :span] = source[:, :, :, skip : skip + span].index_select(1, rows)
        self.states.fill(slots, other.states, rows)


class _Prefill:
    """Fills the states of a cache of as many slots as there are rows. They hold the tokens before, if any.

    lengths: new tokens of each row, int64 [slots]; None where no row is padded.
    """

    def __init__(self, cache: KVCache, lengths: torch.Tensor | None = None) -> None:
        self.cache = cache
        self.lengths = lengths

    def recur(self, layer: int, net: Net, x: torch.Tensor) -> torch.Tensor:
        states = self.cache.states
        out, states.layers[layer] = net.run(x, states.layers[layer], self.lengths)
        return out


class PrefillAttention(_Prefill):
    """Causal attention over right-padded prompts that start at position 0; fills a cache of as many slots."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beside: Beside | None = None
    ) -> torch.Tensor:
        keys, values = self.cache.of(layer)
        keys[:, :, : k.shape[1]] = k.transpose(1, 2)
        values[:, :, : v.shape[1]] = v.transpose(1, 2)
        return causal(q, k, v, beside)


class ExtendAttention(_Prefill):
    """Causal attention of new, right-padded tokens that follow what the cache holds already.

    `starts` says how many tokens each slot holds, int64 [slots]. The cache is one token longer than the
    longest sequence: padding goes there, and is never seen.
    """

    def __init__(
        self, cache: KVCache, starts: torch.Tensor, time: int, lengths: torch.Tensor | None = None
    ) -> None:
        super().__init__(cache, lengths)
        positions = starts[:, None] + torch.arange(time, device=starts.device)
        self.slots = torch.arange(cache.slots, device=starts.device)[:, None]
        self.places = positions.clamp(max=cache.length - 1)
        self.positions = positions[..., None]
        self.every = torch.arange(cache.length, device=starts.device)
        self.mask = (self.every <= self.positions)[:, None]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beside: Beside | None = None
    ) -> torch.Tensor:
        keys, values = self.cache.of(layer)
        keys[self.slots, :, self.places] = k
        values[self.slots, :, self.places] = v
        mask = self.mask
        sinks = None if beside is None else beside.sinks
        if beside is not None and beside.window:
            mask = mask & beside.near(self.positions, self.every)[:, None]
        return masked(q.transpose(1, 2), keys, values, mask, sinks=sinks).transpose(1, 2)


class DecodeAttention:
    """One new token per slot, for the first slots of a cache.

    It writes into the cache, so under no_grad only. Shapes depend on rows and span alone.

    Args:
        positions: Where the new token of each row goes, int64 [rows].
        span: The largest position + 1 or more; an int, so that no device is asked for it.
        before: What rows see beside it.
    """

    def __init__(
        self, cache: KVCache, positions: torch.Tensor, span: int, before: Before | None = None
    ) -> None:
        self.cache = cache
        self.span = span
        self.rows = len(positions)
        self.before = before
        self.positions = positions[:, None]
        heads = cache.shape[2]
        device = positions.device
        dtype = cache.layers[0].dtype
        every = torch.arange(self.rows * heads, device=device) * cache.length
        self.places = (every.view(self.rows, heads) + positions[:, None]).view(-1)
        unseen = torch.arange(span, device=device) > positions[:, None]
        bias = torch.zeros(unseen.shape, dtype=dtype, device=device)
        self.bias = bias.masked_fill_(unseen, float("-inf"))[:, None, None]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beside: Beside | None = None
    ) -> torch.Tensor:
        _, _, heads, _, dim = self.cache.shape
        keys, values = self.cache.of(layer).unbind(0)
        keys.view(-1, dim).index_copy_(0, self.places, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self.places, v.reshape(-1, dim))
        keys = keys[: self.rows, :, : self.span]
        values = values[: self.rows, :, : self.span]
        folded = q.reshape(self.rows, heads, -1, dim)  # the query heads of one kv head, side by side
        bias = self.bias
        sinks = None if beside is None else beside.sinks.view(heads, -1, 1)
        if beside is not None and beside.window:  # a row sees itself in any case
            is_far = ~beside.near(self.positions, torch.arange(self.span, device=q.device))
            bias = bias.masked_fill(is_far[:, None, None], float("-inf"))
        if self.before is None:
            return attend(folded, keys, values, bias, sinks).reshape(q.shape)
        out, own = attend_in_part(folded, keys, values, bias, is_plain=beside is None)
        earlier, total = self.before.seen(layer, folded, beside)
        is_alone = self.before.is_alone  # and has nothing of the prompt of others, which may be spoilt
        both = torch.lerp(out.float(), earlier.float(), torch.sigmoid(total - own))
        both = torch.where(is_alone, out, both.to(out.dtype))
        if sinks is not None:  # they come in last
            every = torch.where(is_alone, own, torch.logaddexp(own, total))
            both = both * torch.sigmoid(every - sinks.float())
        return both.to(q.dtype).reshape(q.shape)

    def recur(self, layer: int, net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.step(x, State(*(part[: self.rows] for part in self.cache.states.layers[layer])))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what short queries see, in the shape of q: by the fused kernel, which is made for long ones,
    where a GPU has work enough for it, and by two batched products elsewhere.

    Args:
        q: Queries, [n, kv heads, queries, head_dim].
        keys, values: Keys and values, [n, kv heads, span, head_dim].
        bias: What is added to the scores.
        sinks: The sinks of `Beside`, [kv heads, queries, 1].
    """
    if sinks is None and _is_fused(keys):
        mask = bias.expand(-1, -1, q.shape[2], -1)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return _by_products(softmax(_scores(q, keys, bias), sinks), values).view(q.shape)


def attend_in_part(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, *, is_plain: bool = True
) -> _Seen:
    """Return what `attend` does for a part of what queries see, and the logsumexp of its scores, which the
    fused kernel has too. is_plain: each query sees something, without a window.
    """
    _, heads, span, dim = keys.shape
    queries = q.shape[2]
    if is_plain and _is_fused(keys) and span % _EVEN == 0 and dim % _WHOLE == 0:
        mask = bias.expand(-1, heads, queries, -1)
        out, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, mask, True)
        return out, total[..., :queries, None]  # the kernel fills it up
    scores = _scores(q, keys, bias).float()
    shares = softmax(scores)
    # a share is exp(score - total)
    total = scores.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log()
    return _by_products(shares, values).view(q.shape), total


def _is_fused(keys: torch.Tensor) -> bool:
    """Return whether the fused kernel attends to keys [n, kv heads, span, head_dim]."""
    count, heads, span, _ = keys.shape
    return keys.device.type == "cuda" and (count * heads > _FEW or span < _LONG)


def _scores(q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return scores, [n, kv heads, queries, span]; a GPU leaves them in float32."""
    count, heads, queries, dim = q.shape
    flat = q.reshape(-1, queries, dim), keys.flatten(0, 1).transpose(1, 2)
    is_narrow = q.device.type == "cuda" and q.dtype != torch.float32
    scores = torch.bmm(*flat, out_dtype=torch.float32) if is_narrow else torch.bmm(*flat)
    return torch.add(bias, scores.view(count, heads, queries, -1), alpha=dim**-0.5)


def _by_products(shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.bmm(shares.to(values.dtype).flatten(0, 1), values.flatten(0, 1))
