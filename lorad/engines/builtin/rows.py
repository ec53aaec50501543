"""What the device knows of each row of the decode batch, and one step of the first rows.

All tensors have one entry per row of capacity and are changed in place, so that a step can be captured once
and
replayed: its shapes depend on the number of rows and the span of the cache, its addresses on nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorad.engines.builtin.calls import Sample
from lorad.engines.builtin.sampler import Steps, keys_of, parameters_of, sample
from lorad.models.base import Base
from lorad.models.decoder import hidden, logits
from lorad.models.kv import DecodeAttention, KVCache
from lorad.models.lora import LoraApply


class Shape(NamedTuple):
    """What a step's shapes depend on: rows, span of the cache (tokens), and what the sampler must do."""

    rows: int
    span: int
    steps: Steps


class Rows:
    """tokens: to be fed next; lengths: tokens in the cache; keys, counts, parameters: see `sampler`."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.lengths, self.keys, self.counts = (torch.zeros_like(self.tokens) for _ in range(3))
        self.parameters = torch.ones(capacity, 3, device=device)

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.lengths, self.keys, self.counts, self.parameters

    def grow(self, capacity: int, used: int) -> None:
        larger = Rows(capacity, self.tokens.device)
        for new, old in zip(larger._tensors(), self._tensors(), strict=True):
            new[:used] = old[:used]
        self.tokens, self.lengths, self.keys, self.counts, self.parameters = larger._tensors()

    def copy(self) -> Rows:
        twin = Rows(0, self.tokens.device)
        twin.tokens, twin.lengths, twin.keys, twin.counts, twin.parameters = (
            t.clone() for t in self._tensors()
        )
        return twin

    def restore(self, before: Rows) -> None:
        """Be again what `copy` gave."""
        for tensor, old in zip(self._tensors(), before._tensors(), strict=True):
            tensor.copy_(old)

    def put(self, start: int, samples: Sequence[Sample], tokens: Tensor, lengths: Sequence[int]) -> None:
        """Fill rows from `start` on with samples whose last token is in `tokens`, not yet in the cache."""
        device, some = self.tokens.device, slice(start, start + len(samples))
        self.tokens[some] = tokens
        self.lengths[some] = torch.tensor(lengths, device=device)
        self.keys[some] = seeds_of(samples).to(device)
        self.counts[some] = torch.tensor([len(sample.tokens) for sample in samples], device=device)
        self.parameters[some] = parameters_of([sample.sampling for sample in samples]).to(device)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows `sources` over rows `targets`."""
        for tensor in self._tensors():
            tensor[list(targets)] = tensor[list(sources)]


def seeds_of(samples: Sequence[Sample]) -> Tensor:
    return keys_of(np.array([sample.seed for sample in samples], np.uint64))


def step(
    base: Base, lora: LoraApply | None, rows: Rows, cache: KVCache, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Feed one token to each of the first rows and sample the next: (tokens int64, logprobs float32)."""
    some = slice(None, shape.rows)
    positions = rows.lengths[some].clamp(max=cache.length - 1)  # rows that are padding run on and on
    attention = DecodeAttention(cache, positions, shape.span)
    states = hidden(base, rows.tokens[some, None], positions[:, None], attention, lora)
    scores = logits(base, states[:, 0], lora)
    tokens, logprobs = sample(scores, rows.keys[some], rows.counts[some], rows.parameters[some], shape.steps)
    rows.tokens[some] = tokens
    rows.lengths[some] += 1
    rows.counts[some] += 1
    return tokens, logprobs
