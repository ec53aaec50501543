"""The decode batch: prompts come in (prefilled once for all their samples), ended samples leave, rows stay dense.

What happens, and in which order, depends on the calls in the batch alone, never on time: a batch with one call in it
gives the same bits whenever it is run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorad.engines.builtin.calls import Call, Group, Sample
from lorad.engines.builtin.sampler import Choice
from lorad.models.base import Base
from lorad.models.decoder import hidden, logits
from lorad.models.kv import DecodeAttention, KVCache, PrefillAttention
from lorad.models.lora import FrozenLora, LoraApply, MixedLora
from lorad.protocol.batch import Chunk

PREFILL_TOKENS = 8192  # per forward, padding included
ROOM = 64  # tokens by which the cache grows at least
STREAM_SECONDS = 0.05  # how often growing samples are reported; ended ones are at once


class DecodeBatch:
    """Calls that are decoded together. All methods belong to the compute thread.

    max_rows: samples at once, exceeded only by a single larger group. cache_bytes: bound on keys and values.
    """

    def __init__(self, base: Base, max_rows: int, cache_bytes: int) -> None:
        self.base, self.max_rows, self.cache_bytes = base, max_rows, cache_bytes
        self.calls: list[Call] = []
        self.pending: deque[Group] = deque()
        self.samples: list[Sample] = []  # one per row, as are all below
        self.loras: list[FrozenLora | None] = []
        self.lengths = np.zeros(0, np.int64)  # tokens in the cache
        self.tokens = torch.zeros(0, dtype=torch.int64)  # to be fed next
        self.choice = Choice(np.zeros(0, np.uint64), [], base.device)
        self.cache = KVCache(base, 0, 0)
        self.mixed: LoraApply | None = None  # the adapter of all rows together
        self.bound = True  # whether `mixed` is of the present rows
        self.reported = 0.0

    def join(self, call: Call) -> None:
        """Queue a call; it is prefilled in a later quantum."""
        self.calls.append(call)
        self.pending.extend(call.groups)

    @property
    def rows(self) -> int:
        return len(self.samples)

    @torch.no_grad()
    def run(self, seconds: float) -> list[tuple[Call, list[Chunk], bool]]:
        """Work for about so long (one step at least); returns (call, new chunks, whether it ended)."""
        deadline = time.monotonic() + seconds
        while self.rows or self.pending:
            self._drop_aborted()
            if self._has_room():
                self._admit()
            elif self.rows:
                self._step()
            if time.monotonic() >= deadline:
                break
        return self._report()

    def _report(self) -> list[tuple[Call, list[Chunk], bool]]:
        now = time.monotonic()
        unfinished = now - self.reported >= STREAM_SECONDS
        self.reported = now if unfinished else self.reported
        reports = [(call, call.chunks(unfinished), call.ended) for call in tuple(self.calls)]
        for call, _, ended in reports:
            if ended:
                self.calls.remove(call)
        return [report for report in reports if report[1] or report[2]]

    def _drop_aborted(self) -> None:
        aborted = [call for call in tuple(self.calls) if call.aborted and not call.ended]
        if not aborted:
            return
        for call in aborted:
            for sample in call.samples:
                sample.finish = sample.finish or "abort"
        self.pending = deque(group for group in self.pending if not group.call.aborted)
        self._retain([sample.finish is None for sample in self.samples])

    def _has_room(self) -> bool:
        """A quarter of the batch is free (prefilling in bulk is cheaper), or all of it."""
        if not self.pending or not self.rows:
            return bool(self.pending)
        most = self._most_rows()
        return self.rows <= most * 3 // 4 and self.rows + len(self.pending[0].samples) <= most

    def _most_rows(self) -> int:
        config = self.base.config
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        longest = max(call.longest for call in self.calls)
        fitting = self.cache_bytes // (per_token * self.base.dtype.itemsize * longest)
        return max(1, min(self.max_rows, fitting))

    def _admit(self) -> None:
        """Prefill the next groups that fit, all of one version, and sample their first tokens."""
        groups = self._next_groups()
        first, cache = self._prefill(groups)
        samples = [sample for group in groups for sample in group.samples]
        sizes = [len(group.samples) for group in groups]
        cache.expand(sizes, cache.length + min(ROOM, max(sample.sampling.max_new_tokens for sample in samples)))
        seeds = np.array([sample.seed for sample in samples], np.uint64)
        choice = Choice(seeds, [sample.sampling for sample in samples], self.base.device)
        repeats = torch.as_tensor(sizes, device=self.base.device)
        tokens, logprobs = choice.sample(first.repeat_interleave(repeats, 0, output_size=len(samples)))
        alive = self._push(samples, tokens, logprobs)
        self._append(groups, samples, choice, tokens, cache)
        self._retain([True] * (self.rows - len(samples)) + alive)

    def _next_groups(self) -> list[Group]:
        groups: list[Group] = []
        lora, rows, longest = self.pending[0].call.lora, self.rows, 0
        while self.pending and self.pending[0].call.lora is lora:
            group = self.pending[0]
            rows, longest = rows + len(group.samples), max(longest, len(group.tokens))
            if groups and (rows > self._most_rows() or (len(groups) + 1) * longest > PREFILL_TOKENS):
                break
            groups.append(self.pending.popleft())
        return groups

    def _prefill(self, groups: Sequence[Group]) -> tuple[Tensor, KVCache]:
        """Logits after each prompt, and a cache with one row per prompt."""
        device = self.base.device
        lengths = [len(group.tokens) for group in groups]
        ids = np.zeros((len(groups), max(lengths)), np.int64)
        for row, group in enumerate(groups):
            ids[row, : lengths[row]] = group.tokens
        cache = KVCache(self.base, len(groups), max(lengths))
        positions = torch.arange(max(lengths), device=device)
        lora = groups[0].call.lora
        states = hidden(self.base, torch.from_numpy(ids).to(device), positions, PrefillAttention(cache), lora)
        last = torch.as_tensor(lengths, device=device) - 1
        return logits(self.base, states[torch.arange(len(groups), device=device), last], lora), cache

    def _append(
        self, groups: Sequence[Group], samples: list[Sample], choice: Choice, tokens: Tensor, cache: KVCache
    ) -> None:
        lengths = [len(group.tokens) for group in groups for _ in group.samples]
        self.loras += [group.call.lora for group in groups for _ in group.samples]
        if self.rows:
            self.cache.append(cache)
            self.choice.append(choice)
            self.tokens = torch.cat([self.tokens, tokens])
        else:
            self.cache, self.choice, self.tokens = cache, choice, tokens
        self.lengths = np.concatenate([self.lengths, np.array(lengths, np.int64)])
        self.samples = self.samples + samples
        self.bound = False

    def _step(self) -> None:
        """Feed one token per row, sample the next, let ended rows leave."""
        if not self.bound:
            self._bind()
        span = int(self.lengths.max()) + 1
        if span > self.cache.length:
            self.cache.grow(max(span + ROOM, span * 5 // 4))
        positions = torch.from_numpy(self.lengths).to(self.base.device)
        attention = DecodeAttention(self.cache, positions, span)
        states = hidden(self.base, self.tokens[:, None], positions[:, None], attention, self.mixed)
        self.tokens, logprobs = self.choice.sample(logits(self.base, states[:, 0], self.mixed))
        self.lengths = self.lengths + 1
        self._retain(self._push(self.samples, self.tokens, logprobs))

    @staticmethod
    def _push(samples: Sequence[Sample], tokens: Tensor, logprobs: Tensor) -> list[bool]:
        """Hand each sample its token; returns which of them go on."""
        rows = zip(samples, tokens.tolist(), logprobs.tolist(), strict=True)
        return [sample.push(token, logprob) for sample, token, logprob in rows]

    def _retain(self, alive: Sequence[bool]) -> None:
        """Let the other rows leave; the last rows move into the holes, so that little is copied."""
        count = sum(alive)
        if count == self.rows:
            return
        holes = [row for row in range(count) if not alive[row]]
        movers = [row for row in range(count, self.rows) if alive[row]]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.cache.move(movers, holes, count)
        rows = torch.tensor(order, dtype=torch.int64)
        self.tokens = self.tokens[rows.to(self.base.device)]
        self.choice.select(rows)
        self.lengths = self.lengths[rows.numpy()]
        self.samples = [self.samples[row] for row in order]
        self.loras = [self.loras[row] for row in order]
        self.bound = False
        if not count:  # a view of no row would keep the memory of all
            self.cache, self.mixed = KVCache(self.base, 0, 0), None

    def _bind(self) -> None:
        """One adapter for all rows, or a mix of them."""
        self.bound = True
        distinct = list(dict.fromkeys(self.loras))
        if len(distinct) < 2:
            self.mixed = distinct[0] if distinct else None
            return
        owner = [distinct.index(lora) for lora in self.loras]
        if isinstance(self.mixed, MixedLora) and self.mixed.loras == tuple(distinct):
            self.mixed.assign(owner)
        else:
            self.mixed = MixedLora(self.base, distinct, owner)
