"""Keys and values of sequences being decoded. Each row has its own length; what lies beyond it is masked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorad.models.attention import causal
from lorad.models.base import Base


class KVCache:
    """[layers, k and v, rows, kv heads, length, head_dim], zero where nothing was written."""

    def __init__(self, base: Base, rows: int, length: int) -> None:
        config = base.config
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, length, config.head_dim)
        self.data = torch.zeros(shape, dtype=base.dtype, device=base.device)

    @property
    def rows(self) -> int:
        return self.data.shape[2]

    @property
    def length(self) -> int:
        return self.data.shape[4]

    def expand(self, counts: Sequence[int], length: int) -> None:
        """Repeat each row so many times, in order, with room for `length` tokens: one prompt, many samples."""
        data = self.data.new_zeros(*self.data.shape[:2], sum(counts), self.data.shape[3], length, self.data.shape[5])
        start = 0
        for row, count in enumerate(counts):
            data[:, :, start : start + count, :, : self.length] = self.data[:, :, row : row + 1]
            start += count
        self.data = data

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        """Copy rows `sources` over rows `targets`, then keep the first `rows`."""
        if sources:
            self.data[:, :, list(targets)] = self.data[:, :, list(sources)]
        self.data = self.data[:, :, :rows]

    def grow(self, length: int) -> None:
        """Make room for sequences of this many tokens."""
        if length > self.length:
            data = self.data.new_zeros(*self.data.shape[:4], length, self.data.shape[5])
            data[:, :, :, :, : self.length] = self.data
            self.data = data

    def append(self, other: KVCache) -> None:
        """Take the rows of another cache after the present ones."""
        length = max(self.length, other.length)
        self.grow(length)
        other.grow(length)
        self.data = torch.cat([self.data, other.data], dim=2)


class PrefillAttention:
    """Causal attention over right-padded prompts that start at position 0; fills a cache of as many rows."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.data[layer]
        keys[:, :, : k.shape[1]] = k.transpose(1, 2)
        values[:, :, : v.shape[1]] = v.transpose(1, 2)
        return causal(q, k, v)


class DecodeAttention:
    """One new token per row against the cache.

    positions: int64 [rows], where the new token goes; span: the largest position + 1 (an int, so that no device is
    asked for it). Under no_grad only: it writes into the cache.
    """

    def __init__(self, cache: KVCache, positions: Tensor, span: int) -> None:
        self.cache, self.span = cache, span
        rows, heads = cache.rows, cache.data.shape[3]
        every = torch.arange(rows * heads, device=positions.device)
        self.places = every * cache.length + positions.repeat_interleave(heads)
        seen = torch.arange(span, device=positions.device) <= positions[:, None]
        bias = torch.zeros(seen.shape, dtype=cache.data.dtype, device=positions.device)
        self.bias = bias.masked_fill_(~seen, float("-inf"))[:, None, None]
        self.scale = cache.data.shape[5] ** -0.5

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, length, dim = self.cache.data.shape[2:]
        keys, values = self.cache.data[layer]
        keys.view(-1, dim).index_copy_(0, self.places, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self.places, v.reshape(-1, dim))
        keys = keys.view(rows * heads, length, dim)[:, : self.span]
        values = values.view(rows * heads, length, dim)[:, : self.span]
        scores = torch.bmm(q.reshape(rows * heads, -1, dim), keys.transpose(1, 2))
        scores = scores.view(rows, heads, -1, self.span).mul_(self.scale).add_(self.bias)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights.view(rows * heads, -1, self.span), values).view(q.shape)
