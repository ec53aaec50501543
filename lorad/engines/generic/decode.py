"""Rows that were prefilled together and are decoded step by step over a cache of transformers."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from lorad.engines.builtin.calls import Call, HeldLora, Report, Sample, SampleGroup
from lorad.engines.builtin.sampler import Steps, keys_of, parameters_of, sample
from lorad.engines.generic.model import GenericModel, RowAdapter

_PREFILL_TOKENS = 8192  # at once, padding included, unless one prompt has more


@dataclass(eq=False)
class HeldRows(HeldLora):
    """A version that this engine holds; `rows` is None for the base."""

    rows: RowAdapter | None = None

    def __post_init__(self) -> None:
        self.bytes = self.rows.bytes if self.rows else 0


class _Cohort:
    """Samples whose prompts were prefilled at once, left-padded to the longest of them.

    A cohort only shrinks, as its samples end: caches of sliding windows and of linear attention cannot be put
    side by side where their lengths differ.
    """

    def __init__(self, model: GenericModel, groups: Sequence[SampleGroup]) -> None:
        self.model = model
        self.samples = [sample for group in groups for sample in group.samples]
        self.calls = [group.call for group in groups for _ in group.samples]
        owner = [number for number, group in enumerate(groups) for _ in group.samples]
        device = model.device
        longest = max(len(group.tokens) for group in groups)
        ids = np.zeros((len(groups), longest), np.int64)
        for row, group in enumerate(groups):
            ids[row, longest - len(group.tokens) :] = group.tokens
        lengths = torch.tensor([len(group.tokens) for group in groups], device=device)
        mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        self.cache = DynamicCache(config=model.config)
        logits = model.forward(
            [_rows_of(group.call) for group in groups],
            torch.from_numpy(ids),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        places = torch.tensor(owner, device=device)
        select(self.cache, places)
        self.mask = mask[places]
        self.positions = lengths[places]
        self._take(logits[places, -1])

    def step(self) -> None:
        """Feed the last token of each sample and draw the next."""
        device = self.model.device
        tokens = torch.tensor([[sample.tokens[-1]] for sample in self.samples], device=device)
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        logits = self.model.forward(
            [_rows_of(call) for call in self.calls],
            tokens,
            attention_mask=self.mask,
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        self._take(logits[:, -1])

    def _take(self, logits: Tensor) -> None:
        """Draw a token for each sample, and let go of the rows of those that ended."""
        samplings = [sample.sampling for sample in self.samples]
        seeds = keys_of(np.array([sample.seed for sample in self.samples], np.uint64))
        counts = torch.tensor([len(sample.tokens) for sample in self.samples])
        device = logits.device
        tokens, logprobs = sample(
            logits,
            seeds.to(device),
            counts.to(device),
            parameters_of(samplings).to(device),
            Steps.of(samplings),
        )
        drawn = zip(self.samples, tokens.tolist(), logprobs.tolist(), strict=True)
        self._keep([row for row, (grown, token, logprob) in enumerate(drawn) if grown.push(token, logprob)])

    def drop_aborted(self) -> None:
        self._keep([row for row, call in enumerate(self.calls) if not call.aborted])

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.samples):
            return
        self.samples = [self.samples[row] for row in rows]
        self.calls = [self.calls[row] for row in rows]
        if rows:
            places = torch.tensor(rows, device=self.model.device)
            select(self.cache, places)
            self.mask = self.mask[places]
            self.positions = self.positions[places]


class GenericBatch:
    """Calls and the cohorts of their samples: what waits is prefilled at once as soon as there are rows.

    max_rows: the samples that are decoded at once.
    most_tokens: the keys and values that they may have, unless one sample alone has more.
    arriving: calls that the asyncio loop has put here; the next quantum takes them.
    pending: the groups without a row.
    """

    def __init__(self, model: GenericModel, max_rows: int, cache_bytes: int) -> None:
        self.model = model
        self.max_rows = max_rows
        self.most_tokens = cache_bytes // model.bytes_per_token()
        self.calls: list[Call] = []
        self.arriving: deque[Call] = deque()
        self.pending: list[SampleGroup] = []
        self.cohorts: list[_Cohort] = []

    @property
    def samples(self) -> list[Sample]:
        return [sample for cohort in self.cohorts for sample in cohort.samples]

    def run(self, seconds: float) -> list[Report]:
        """Work for about so long, one step at least."""
        deadline = time.monotonic() + seconds
        while self.arriving:
            call = self.arriving.popleft()
            self.calls.append(call)
            self.pending += call.groups
        while self.pending or self.cohorts:
            if any(call.aborted for call in self.calls):
                for growing in (growing for call in self.calls if call.aborted for growing in call.open):
                    growing.finish = growing.finish or "abort"
                self.pending = [group for group in self.pending if not group.call.aborted]
                for cohort in self.cohorts:
                    cohort.drop_aborted()
                self.cohorts = [cohort for cohort in self.cohorts if cohort.samples]
            if groups := self._admitted():
                self.cohorts.append(_Cohort(self.model, groups))
            else:
                for cohort in self.cohorts:
                    cohort.step()
            self.cohorts = [cohort for cohort in self.cohorts if cohort.samples]
            if time.monotonic() >= deadline:
                break
        now = time.monotonic()
        reports = [
            (call, chunks, call.ended) for call in self.calls if (chunks := call.report(now)) is not None
        ]
        self.calls = [call for call in self.calls if not call.ended]
        return reports

    def _admitted(self) -> list[SampleGroup]:
        """Take the next groups that fit, `_PREFILL_TOKENS` of prompts at most; split a large one."""
        running = self.samples
        rows = self.max_rows - len(running)
        cached = sum(cohort.mask.shape[1] * len(cohort.samples) for cohort in self.cohorts)
        to_come = sum(growing.sampling.max_new_tokens - len(growing.tokens) for growing in running)
        tokens = self.most_tokens - cached - to_come
        admitted: list[SampleGroup] = []
        longest = 0
        longest_prompt = 0
        count = 0
        while self.pending:
            group = self.pending[0]
            longest = max(longest, len(group.tokens) + group.call.sampling.max_new_tokens)
            room = min(rows, tokens // longest) - count
            if not running and not admitted:
                room = max(room, 1)
            longest_prompt = max(longest_prompt, len(group.tokens))
            is_full = bool(admitted) and (len(admitted) + 1) * longest_prompt > _PREFILL_TOKENS
            if room < 1 or is_full:
                break
            first, others = group.split(room)
            admitted.append(first)
            count += len(first.samples)
            self.pending[:1] = [others] if others.samples else []
        return admitted


def _rows_of(call: Call) -> RowAdapter | None:
    version = call.held
    assert isinstance(version, HeldRows)
    return version.rows


def select(cache: Any, rows: Tensor) -> None:
    """Keep rows of a cache, in this order; a row may be there several times.

    Layers of linear attention have states of each row, and no method for it.
    """
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states: Any = getattr(layer, name, None)
            if isinstance(states, Tensor):
                setattr(layer, name, states.index_select(0, rows))
                continue
            for key in states if isinstance(states, dict) else range(len(states or ())):
                if isinstance(states[key], Tensor):
                    states[key] = states[key].index_select(0, rows)
        if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.numel():
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)
