"""The decode batch: prompts come in (prefilled once for all their samples), ended samples leave, rows stay
dense.

What happens, and in which order, depends on the calls in the batch alone, never on time: a batch with one
call in it gives the same bits whenever it is run.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from lorad.engines.builtin.calls import SHARED, Call, Report, Sample, SampleGroup
from lorad.engines.builtin.prefix import PrefixCache, prefill
from lorad.engines.builtin.prompts import NONE, SharedPrompts
from lorad.engines.builtin.sampler import Steps, parameters_of, sample
from lorad.engines.builtin.steps import (
    Memory,
    Rows,
    Stepper,
    StepShape,
    is_captured,
    joined,
    seeds_of,
    stepper,
)
from lorad.models.delta.states import bytes_per_row
from lorad.models.experts import Recording, route_shape
from lorad.models.kv import KVCache, bytes_per_token, even
from lorad.models.merge import Merger
from lorad.models.ops import download, upload
from lorad.models.turns import FIRST_SHARE

_PREFILL_TOKENS = 8192  # per forward, padding included
_PREFILL_WORK = 2 * 10**11  # floating-point operations of one forward on a CPU: others wait for so much
_IDLE_PROMPTS = 8  # one in so many tokens stays with shared prompts when there are none
_BANKS = 8  # one in so many bytes is for copies of adapters that captured steps read
_ROOM = 64  # tokens that a row can grow by before rows are asked to make room
SHARE = 8  # rows are admitted when one in so many is free: prefilling in bulk is cheaper
SEEN = 1000  # steps


class _Waiting:
    """Groups that wait for rows, in two lines: one for parties that go first, one for all others.

    Iterates over all, those that go first before the others.
    """

    def __init__(self) -> None:
        self.first: deque[SampleGroup] = deque()
        self.others: deque[SampleGroup] = deque()

    def __bool__(self) -> bool:
        return bool(self.first or self.others)

    def __iter__(self) -> Iterator[SampleGroup]:
        return chain(self.first, self.others)

    def add(self, call: Call) -> None:
        (self.first if call.goes_first else self.others).extend(call.groups)

    def put_back(self, group: SampleGroup) -> None:
        """Put a group back at the head of its line."""
        (self.first if group.call.goes_first else self.others).appendleft(group)

    def drop_aborted(self) -> None:
        for line in (self.first, self.others):
            left = [group for group in line if not group.call.aborted]
            line.clear()
            line.extend(left)

    def samples(self, enough: int) -> int:
        """Count the waiting samples, but no further than `enough`."""
        count = 0
        for group in self:
            count += len(group.samples)
            if count > enough:
                break
        return count


class DecodeBatch:
    """Calls that are decoded together. All methods belong to the compute thread.

    max_rows: samples at once.
    cache_bytes: bound on keys and values, and the copies of adapters that captured steps read, exceeded only
        by a single longer sample or larger copy; when samples outgrow it, the youngest give up their rows and
        are computed again later. A long prompt is kept once for all its samples (see `SharedPrompts`).
    prefixes: where beginnings of prompts are kept, if they are.
    seen: gets the number of versions in each step that has any, the base not counted.

    Groups of parties that go first are admitted before others, at once, while they have less than
    `FIRST_SHARE` of the rows.
    """

    def __init__(
        self,
        models: Merger,
        max_rows: int,
        cache_bytes: int,
        prefixes: PrefixCache | None = None,
        seen: deque[int] | None = None,
    ) -> None:
        base = models.base
        self.models = models
        self.max_rows = max_rows
        self.prefixes = prefixes
        bank_bytes = cache_bytes // _BANKS if is_captured(base) else 0
        self.most_tokens = max(1, (cache_bytes - bank_bytes) // bytes_per_token(base))
        # as many bytes as the states of a row are
        self.state_tokens = -(-bytes_per_row(base) // bytes_per_token(base))
        work = (
            _PREFILL_WORK // (2 * base.config.num_parameters)
            if base.device.type == "cpu"
            else _PREFILL_TOKENS
        )
        self.prefill_tokens = min(_PREFILL_TOKENS, work)
        self.calls: list[Call] = []
        self.pending = _Waiting()
        self.samples: list[Sample] = []  # one per row, oldest first but for those that fill holes
        self.groups: list[SampleGroup] = []  # one per row
        self.lengths = np.zeros(0, np.int64)  # one per row: tokens in the cache, a shared prompt not counted
        self.slots = np.zeros(0, np.int64)  # one per row: that of its shared prompt
        self.memory = Memory(Rows(0, base.device), KVCache(base, 0, 0), SharedPrompts(base))
        self.stepper: Stepper = stepper(models, bank_bytes)
        self.steps = Steps.of([])
        # what is drawn again would be two steps of the states of a gated delta net
        self.is_bounded = base.device.type == "cuda" and base.config.delta is None
        self.bound = True  # whether stepper and steps know of the present rows
        self.versions = 0  # in a step, when bound
        self.seen: deque[int] = deque(maxlen=SEEN) if seen is None else seen
        self.admitted = self.preempted = 0
        self.failed = False
        self.is_lent = False  # whether others have written into the cache

    @property
    def cache(self) -> KVCache:
        return self.memory.cache

    @property
    def prompts(self) -> SharedPrompts:
        return self.memory.prompts

    def join(self, call: Call) -> bool:
        """Queue a call, which is prefilled in a later quantum; False, and not queued, when a quantum has
        failed.
        """
        if not self.failed:
            self.calls.append(call)
            self.pending.add(call)
        return not self.failed

    def lend(self) -> list[torch.Tensor] | None:
        """Return the memory of the cache, flat and uint8, which is its borrower's until the next quantum;
        None while calls need it. Captured steps outlive that, as nothing moves.
        """
        if self.calls:
            return None
        self.is_lent = True
        return [layer.view(-1).view(torch.uint8) for layer in self.cache.layers if layer.numel()]

    @torch.no_grad()
    def run(self, seconds: float) -> list[Report]:
        """Work for about so long (one step at least)."""
        deadline = time.monotonic() + seconds
        if self.is_lent:  # masked values must be finite
            self.is_lent = False
            for layer in self.cache.layers:
                layer.zero_()
        try:
            while self.samples or self.pending:
                self._drop_aborted()
                if self._has_room():
                    self._admit()
                elif self.samples:
                    self._make_room()
                    self._step()
                if time.monotonic() >= deadline:
                    break
            if not self.samples:
                self.stepper.bind([])  # and forget the adapters of those that were here
                if not self.stepper.keeps_cache:
                    base = self.models.base
                    self.memory = Memory(self.memory.rows, KVCache(base, 0, 0), SharedPrompts(base))
        except BaseException:
            self.failed = True  # nobody knows what it has done to its rows
            raise
        now = time.monotonic()
        news = [(call, chunks) for call in self.calls if (chunks := call.report(now)) is not None]
        reports = [(call, chunks, call.ended) for call, chunks in news]
        self.calls = [call for call in self.calls if not call.ended]
        return reports

    def _drop_aborted(self) -> None:
        aborted = [call for call in tuple(self.calls) if call.aborted and not call.ended]
        if not aborted:
            return
        for call in aborted:
            for growing in call.open:
                growing.finish = growing.finish or "abort"
        self.pending.drop_aborted()
        self._retain([growing.finish is None for growing in self.samples])

    def _line(self, more: int = 0) -> deque[SampleGroup]:
        """Return the line whose head is next. more: rows that the calls that go first are about to have."""
        first = self.pending.first
        others = self.pending.others
        if not first or not others:
            return first or others
        rows = more + sum(group.call.goes_first for group in self.groups)
        most = self._fitting(int(self.lengths.max(initial=0)) + _ROOM)
        return first if rows < max(1.0, FIRST_SHARE * most) else others

    def _fitting(self, span: int, groups: Sequence[SampleGroup] = ()) -> int:
        """Return how many rows of `span` tokens fit beside the prompts that are shared, at least one. groups:
        that come in.
        """
        span += self.state_tokens
        most = self.most_tokens - self.prompts.tokens(*self._shared(groups))
        rows = max(1, min(self.max_rows, most // span))
        while rows > 1 and self.stepper.padded(rows) * span > most:
            rows -= 1
        return rows

    def _shared(self, groups: Sequence[SampleGroup]) -> tuple[int, int]:
        """Return how many prompts come in that rows will share, and the tokens of the longest."""
        new = {group.key: group.prompt for group in groups if group.shares and group.key not in self.prompts}
        return len(new), max(new.values(), default=0)

    def _own(self, group: SampleGroup) -> int:
        """Return how many tokens of a group each of its rows holds itself at first."""
        return len(group.tokens) - group.prompt * self._is_shared(group)

    def _is_shared(self, group: SampleGroup) -> bool:
        """Return whether the rows of a group continue a prompt that is kept once."""
        return group.shares or (group.prompt >= SHARED and group.key in self.prompts)

    def _has_room(self) -> bool:
        """Return whether the next group fits, and enough rows are free (or few enough samples wait) to make
        it worth it.
        """
        line = self._line()
        if not line or not self.samples:
            return bool(line)
        group = line[0]
        most = self._fitting(max(int(self.lengths.max()), self._own(group)) + _ROOM, [group])
        free = most - len(self.samples)
        needed = len(group.samples) if len(group.samples) * 2 <= most else 1
        at_once = line is self.pending.first and len(self.calls) > 1
        return needed <= free and (at_once or free * SHARE >= most or self.pending.samples(free) <= free)

    def _admit(self) -> None:
        """Prefill the next groups that fit, all of one version, and sample their next tokens."""
        groups = self._next_groups()
        scores, cache, routes = prefill(self.models, groups, groups[0].call.held, self.prefixes)
        for group, prompt_routes in zip(groups, routes, strict=False):
            for growing in group.samples if group.call.sampling.routes else ():
                growing.prefilled(prompt_routes, group.prompt)
        samples = [growing for group in groups for growing in group.samples]
        owners = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
        totals = np.array([len(groups[owner].tokens) for owner in owners])
        own = np.array([self._own(groups[owner]) for owner in owners])
        start = len(self.samples)
        spare = self.most_tokens // _IDLE_PROMPTS if self.stepper.keeps_cache else 0
        self.prompts.reserve(*self._shared(groups), spare)
        self._reserve(start + len(samples), int(own.max()) + 1, _longest(own, samples))
        slots = self._place(groups, cache, owners, start)
        samplings = [growing.sampling for growing in samples]
        counts = np.array([len(growing.tokens) for growing in samples])
        arrays = [owners, totals, counts, seeds_of(samples), parameters_of(samplings).numpy()]
        rows, lengths, drawn, keys, parameters = upload(arrays, self.models.base.device)
        scores = scores.index_select(0, rows)
        tokens, logprobs = sample(scores, keys, drawn, parameters, Steps.of(samplings))
        alive = _push(samples, download(joined(tokens, logprobs)))
        self.memory.rows.put(start, (tokens, lengths, keys, drawn + 1, parameters))
        for growing in samples:
            growing.number = growing.number or self.admitted + 1
            self.admitted += 1
        self.samples = self.samples + samples
        self.groups = self.groups + [groups[owner] for owner in owners]
        shared = [groups[owner].prompt for owner in owners] * (slots != NONE)
        self.lengths = np.concatenate([self.lengths, totals - shared])
        self.slots = np.concatenate([self.slots, slots])
        self.bound = False
        self._retain([True] * start + alive)

    def _place(
        self, groups: Sequence[SampleGroup], cache: KVCache, owners: np.ndarray, start: int
    ) -> np.ndarray:
        """Take over the keys and values of prompts, and return the slot of each new row's shared prompt.

        owners: The number of the group that each row from `start` on belongs to.
        """
        slots = np.full(len(groups), NONE)
        device = self.models.base.device
        for row, group in enumerate(groups):
            if self._is_shared(group):
                slots[row] = self.prompts.put(group.key, cache, row, group.prompt)
        skips = np.array([group.prompt for group in groups]) * (slots != NONE)
        for skip in sorted(set(skips.tolist())):
            mine = np.flatnonzero(skips[owners] == skip)
            is_all = len(mine) == len(owners)
            targets, sources = upload([start + mine, owners[mine]], device)
            rows = slice(start, start + len(mine)) if is_all else targets
            self.cache.fill(rows, cache, sources, skip)
        of_rows: np.ndarray = slots[owners]
        return of_rows

    def _next_groups(self) -> list[SampleGroup]:
        """Take the next groups of one version whose rows fit, and whose prompts fit into one forward.

        The last may be split.
        """
        groups: list[SampleGroup] = []
        line = self._line()
        version = line[0].call.held
        rows = len(self.samples)
        longest = 0
        span = int(self.lengths.max(initial=0))
        while line and line[0].call.held is version:
            group = line[0]
            longest = max(longest, len(group.tokens))
            span = max(span, self._own(group))
            most = self._fitting(span + _ROOM, [*groups, group])
            if groups and (len(groups) + 1) * longest > self.prefill_tokens:
                break
            if groups and line is self.pending.first and self._line(rows - len(self.samples)) is not line:
                break
            if rows + len(group.samples) > most:
                if most <= rows or len(group.samples) * 2 <= most:
                    break
                group, rest = group.split(most - rows)
                line[0] = rest
            else:
                line.popleft()
            groups.append(group)
            rows += len(group.samples)
        return groups

    def _reserve(self, rows: int, length: int, longest: int) -> None:
        """See that the cache has slots for so many rows of so many tokens, and for those that will follow
        them. longest: tokens that no row will exceed.
        """
        most = self.most_tokens - self.prompts.tokens()
        state = self.state_tokens
        length = max(length, int(self.lengths.max(initial=0)) + 1)
        slots = self.stepper.padded(rows)
        if slots > self.cache.slots:
            follow = rows + self.pending.samples(self.max_rows)
            slots = max(slots, self.stepper.padded(min(follow, self._fitting(length + _ROOM))))
        if length > self.cache.length:
            ahead = min(longest, max(length + _ROOM, 4 * length))
            if self.stepper.keeps_cache:
                ahead = longest  # a cache that moves is captured again
            length = max(length, min(ahead, max(0, most) // slots - state))
        length = max(length, min(self.cache.length, max(0, most) // slots - state))
        if slots * (even(length) + state) <= most:
            length = even(length)
        slots = max(slots, min(self.cache.slots, max(0, most) // (length + state)))
        self.cache.resize(slots, length, len(self.samples))
        if slots > self.memory.rows.capacity:
            most_rows = self.stepper.padded(self.max_rows) if self.stepper.keeps_cache else 0
            self.memory.rows.grow(max(slots, most_rows), len(self.samples))

    def _make_room(self) -> None:
        """Before a step: the longest row needs one more token,
        which the youngest rows may have to pay for.
        """
        span = int(self.lengths.max()) + 1
        if span <= self.cache.length:
            return
        # no smaller steps: each may move the whole cache
        longest = _longest(self.lengths, self.samples)
        most = self._fitting(min(span + _ROOM, longest))
        if len(self.samples) > most:
            # the youngest rows go back to the heads of the lines; those that go first stay, if they are few
            first = np.array([group.call.goes_first for group in self.groups])
            first &= first.sum() <= FIRST_SHARE * most
            age = np.lexsort((np.array([sample.number for sample in self.samples]), ~first))
            leaving = age[most:].tolist()
            self.preempted += len(leaving)
            for row in reversed(leaving):
                self.pending.put_back(self.groups[row].resumed(self.samples[row]))
            self._retain([row not in leaving for row in range(len(self.samples))])
        self._reserve(len(self.samples), span, longest)

    def _step(self) -> None:
        """Feed one token per row, sample the next, let ended rows leave."""
        if not self.bound:
            self.stepper.bind([group.call.held.lora for group in self.groups])
            self.prompts.assign(self.slots, self.memory.rows.capacity, self.stepper.padded, self.stepper.span)
            samplings = {id(sample.sampling): sample.sampling for sample in self.samples}.values()
            self.steps = Steps.of(samplings)._replace(bounded=self.is_bounded)
            self.versions = len(
                {group.call.held for group in self.groups if group.call.held.lora is not None}
            )
            self.bound = True
        if self.versions:
            self.seen.append(self.versions)
        drawn = self._drawn()
        if any(token < 0 for token, _ in drawn):  # once per rows: such a distribution has others behind it
            self.memory.rows.rewind([sample.tokens[-1] for sample in self.samples])
            self.steps = self.steps._replace(bounded=False)
            drawn = self._drawn()
        self.lengths = self.lengths + 1
        self._retain(_push(self.samples, drawn))

    def _drawn(self) -> list[tuple[float, float]]:
        """Run a step, and return a token and its log-probability for each row."""
        shape = StepShape(len(self.samples), int(self.lengths.max()) + 1, self.steps, self.prompts.shape)
        routed = [row for row, sample in enumerate(self.samples) if sample.sampling.routes]
        kind = route_shape(self.models.base) if routed else None
        recording = None if kind is None else Recording(kind)
        drawn: list[tuple[float, float]] = download(self.stepper.run(self.memory, shape, recording))
        if recording is not None and all(token >= 0 for token, _ in drawn):
            routes = recording.routes()
            for row in routed:
                self.samples[row].routes.append(routes[row : row + 1])
        return drawn

    def _retain(self, alive: Sequence[bool]) -> None:
        """Let the other rows leave; the last rows move into the holes, so that little is copied."""
        count = sum(alive)
        if count == len(self.samples):
            return
        holes = [row for row in range(count) if not alive[row]]
        movers = [row for row in range(count, len(self.samples)) if alive[row]]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        spoilt = any(sample.is_spoilt for sample in self.samples)
        if spoilt:
            self.cache.wipe(holes)
        if movers:
            sources, targets = upload([np.array(movers), np.array(holes)], self.models.base.device)
            self.cache.move(sources, targets, int(self.lengths[movers].max()))
            self.memory.rows.move(sources, targets)
        if spoilt:
            self.cache.wipe(range(count, len(self.samples)))
        self.lengths = self.lengths[order]
        self.slots = self.slots[order]
        self.prompts.keep(self.slots.tolist())
        self.samples = [self.samples[row] for row in order]
        self.groups = [self.groups[row] for row in order]
        self.bound = False


def _longest(lengths: np.ndarray, samples: Sequence[Sample]) -> int:
    """Return the tokens that no row will exceed; `lengths` are the present ones of the rows of `samples`."""
    rows = zip(map(int, lengths), samples, strict=True)
    return max(length + sample.sampling.max_new_tokens - len(sample.tokens) for length, sample in rows)


def _push(samples: Sequence[Sample], drawn: Sequence[tuple[float, float]]) -> list[bool]:
    """Append to each sample its token; returns which of them continue."""
    rows = zip(samples, drawn, strict=True)
    return [growing.push(int(token), logprob) for growing, (token, logprob) in rows]
