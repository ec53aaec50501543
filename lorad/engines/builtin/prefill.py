"""Prompts through the model: once each, several at a time, beginning where the prefix cache ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorad.engines.builtin.calls import Group
from lorad.engines.builtin.prefix import BLOCK, PrefixCache
from lorad.engines.builtin.versions import HeldLora
from lorad.models.decoder import hidden, logits
from lorad.models.kv import ExtendAttention, KVCache, PrefillAttention
from lorad.models.merge import Merger


def prefill(
    models: Merger, groups: Sequence[Group], held: HeldLora, prefixes: PrefixCache | None
) -> tuple[Tensor, KVCache]:
    """(logits [groups, vocab] after each prompt, a cache with one slot per prompt), all under one version."""
    known = [prefixes.find(held.identity, group.tokens) if prefixes else [] for group in groups]
    starts = [len(keys) * BLOCK for keys in known]
    cache = KVCache(models.base, len(groups), max(len(group.tokens) for group in groups) + any(starts))
    if prefixes:
        for slot, keys in enumerate(known):
            prefixes.read(keys, cache, slot)
    scores = _forward(models, groups, starts, cache, held)
    if prefixes:
        for slot, group in enumerate(groups):
            prefixes.write(held.identity, group.tokens, cache, slot)
    return scores, cache


def _forward(
    models: Merger, groups: Sequence[Group], starts: Sequence[int], cache: KVCache, held: HeldLora
) -> Tensor:
    """Logits after the last token of each prompt, whose first tokens (`starts`) the cache holds already."""
    base, lora = models.alone(held.lora)
    rest = [group.tokens[start:] for group, start in zip(groups, starts, strict=True)]
    ids = np.zeros((len(rest), max(len(row) for row in rest)), np.int64)
    for row, tokens in enumerate(rest):
        ids[row, : len(tokens)] = tokens
    positions = torch.arange(ids.shape[1], device=base.device)
    attention: PrefillAttention | ExtendAttention = PrefillAttention(cache)
    if any(starts):
        begins = torch.tensor(starts, device=base.device)
        attention = ExtendAttention(cache, begins, ids.shape[1])
        positions = attention.places
    states = hidden(base, torch.from_numpy(ids).to(base.device), positions, attention, lora)
    last = torch.tensor([len(tokens) - 1 for tokens in rest], device=base.device)
    return logits(base, states[torch.arange(len(rest), device=base.device), last], lora)
