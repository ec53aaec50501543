"""Packed sequences laid side by side: which rows stand in which cell of which block, and back.

Sequences lie in rows one after another without padding; some share a prompt, which is a sequence too.
Attention wants rectangles, so sequences of similar lengths make up a block: only the attention of a few rows
is padded, nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lorad.models.attention import Beside
from lorad.models.base import Base
from lorad.models.ops import upload

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

LONG = 256
"""From so many keys on, a block uses the fused kernel, whose memory does not grow with queries x keys."""


@dataclass(frozen=True)
class Sequences:
    """Runs of rows that attend causally to themselves, and before that to the run that they share and to what
    that one shares.

    All arrays are int64 [S]. `owner` is the index of the run that is shared, -1 for none. A completion shares
    its prompt, which may share a stem.
    """

    starts: Ints
    lengths: Ints
    owner: Ints

    @cached_property
    def prefixes(self) -> Ints:
        """Return how many tokens come before each run."""
        return sum((length for _, length in self._above), np.zeros_like(self.lengths))

    @cached_property
    def levels(self) -> Ints:
        """Return how many runs come before each run."""
        return sum(((above >= 0).astype(np.int64) for above, _ in self._above), np.zeros_like(self.lengths))

    def before(self, runs: Ints) -> Ints:
        """Return [len(runs), P]: the rows that come before each run, the last one repeated for padding."""
        ends = self.prefixes[runs]
        cells = np.broadcast_to(np.arange(ends.max(initial=0)), (len(runs), ends.max(initial=0)))
        cells = np.minimum(cells, ends[:, None] - 1)
        rows: Ints = np.zeros_like(cells)
        for above, lengths in self._above:
            starts = ends - lengths[runs]
            inside = (cells >= starts[:, None]) & (cells < ends[:, None])
            rows = np.where(inside, self.starts[above[runs]][:, None] + cells - starts[:, None], rows)
            ends = starts
        return rows

    @cached_property
    def _above(self) -> list[tuple[Ints, Ints]]:
        """Return the run above each run and its length, -1 and 0 for none; the nearest first, then the one
        above that, until none has any.
        """
        above = self.owner
        pairs = []
        while (above >= 0).any():
            pairs.append((above, np.where(above < 0, 0, self.lengths[above])))
            above = np.where(above < 0, -1, self.owner[above])
        return pairs


@dataclass(frozen=True, slots=True)
class Block:
    """S sequences with Q queries and K = P + Q keys, the first P of which belong to what they share.

    Attributes:
        queries: The rows of q seen as [rows * heads, head_dim], kv head by kv head, int64 [S * heads * Q].
        keys: The rows of k and v likewise, int64 [S * kv * K].
        live: Zero where a query is padding, [S, 1, 1, Q, 1]; None when none is.
        level: How many runs come before each.
        is_shared: Whether others share any of them.
        sharers: The run that each sequence shares, counted in the order of the blocks of its level, int64
            [S]; None on the first level.
        cells: The row of each query, int64 [S, Q]; None where the base has no gated delta nets.
        lengths: How many queries each sequence has, int64 [S]; None where no query is padding.
    """

    shape: tuple[int, int, int, int]  # S, P, Q, K
    # which kernel, and so which bias: boolean [1, 1, Q, K], else [S * kv or 1, heads / kv * Q, K]
    fused: bool
    queries: Tensor
    keys: Tensor
    # None of fused blocks that share nothing, without sinks: the kernel knows what is causal
    bias: Tensor | None
    live: Tensor | None
    level: int
    is_shared: bool
    sharers: Tensor | None
    near: Tensor | None = None  # as bias, of layers with a window
    cells: Tensor | None = None
    lengths: Tensor | None = None

    def seen(self, beside: Beside | None) -> Tensor | None:
        """Return the bias of a layer."""
        return self.near if beside is not None and beside.window else self.bias


class Layout:
    """The blocks of one micro-batch, what is shared first. It is made on the host; `move` puts it on the
    device, where attention wants it.

    Attributes:
        out: Where the output of each query head is among the outputs of all blocks, int64 [rows * heads].
        home: Where each key head is among the keys of all blocks, int64 [rows * kv].
        places: Where each row is among the cells of all blocks, int64 [rows]; None as `Block.cells` is.
    """

    def __init__(self, base: Base, rows: int, sequences: Sequences) -> None:
        config = base.config
        self.heads = config.num_attention_heads
        self.kv = config.num_key_value_heads
        self.dim = config.head_dim
        self._base = base
        self._sequences = sequences
        self.window = max(config.windows, default=0)
        groups = list(similar(sequences))
        levels = sequences.levels
        ends = sequences.prefixes + sequences.lengths
        self._rank = np.zeros_like(ends)  # of each run on its level, in the order of the blocks
        self.levels: list[tuple[int, int]] = []
        """By level, how many runs it has, and the most keys that one of them has."""
        for level in range(max(int(levels[g[0]]) for g in groups) + 1):
            runs = np.concatenate([g for g in groups if levels[g[0]] == level])
            self._rank[runs] = np.arange(len(runs))
            self.levels.append((len(runs), int(ends[runs].max())))
        out = np.zeros(rows * self.heads, np.int64)
        home = np.zeros(rows * self.kv, np.int64)
        places = None if config.delta is None else np.zeros(rows, np.int64)
        self._groups = groups
        self._written: dict[tuple[int, str], np.ndarray] = {}  # by block and name: all are moved at once
        outputs = keys = 0
        for number, group in enumerate(groups):
            written = self._arrays(group, out, home, places, outputs, keys)
            self._written |= {(number, name): array for name, array in written.items()}
            outputs += written["queries"].size
            keys += written["keys"].size
        self._whole = [out, home] if places is None else [out, home, places]

    def move(self) -> "Layout":
        """Put it on the device, once."""
        moved = upload([*self._whole, *self._written.values()], self._base.device)
        self.out, self.home, *rest = moved[: len(self._whole)]
        self.places = rest[0] if rest else None
        tensors = dict(zip(self._written, moved[len(self._whole) :], strict=True))
        self.blocks = [
            self._block(group, {name: tensor for (of, name), tensor in tensors.items() if of == number})
            for number, group in enumerate(self._groups)
        ]
        self._whole = []
        self._written = {}
        return self

    def _arrays(
        self, group: Ints, out: Ints, home: Ints, places: Ints | None, outputs: int, keys: int
    ) -> dict[str, np.ndarray]:
        """Return what a block has, by name; write where its cells are into `out`, `home` and `places`."""
        runs = self._sequences
        rep = self.heads // self.kv
        lengths = runs.lengths[group]
        prefixes = runs.prefixes[group]
        wide = int(prefixes.max())
        long = int(lengths.max())
        # a run's last row is repeated for padding
        cells = np.minimum(np.arange(long), np.maximum(lengths, 1)[:, None] - 1)
        own = runs.starts[group][:, None] + cells
        seen = np.concatenate([runs.before(group), own], 1)
        query_heads = own[:, None, None] * self.heads + np.arange(self.heads).reshape(1, self.kv, rep, 1)
        key_heads = seen[:, None] * self.kv + np.arange(self.kv)[:, None]
        live = np.arange(long) < lengths[:, None]
        _write(out, query_heads, outputs, live[:, None, None])
        _write(home, key_heads, keys, np.pad(live, ((0, 0), (wide, 0)))[:, None])
        arrays = {"queries": query_heads.ravel(), "keys": key_heads.ravel(), "prefixes": prefixes}
        if not live.all():
            arrays["live"] = live[:, None, None, :, None]
            arrays["lengths"] = lengths
        if runs.owner[group[0]] >= 0:
            arrays["sharers"] = self._rank[runs.owner[group]]
        if places is not None:
            _write(places, own, outputs // self.heads, live)
            arrays["cells"] = own
        return arrays

    def _block(self, group: Ints, tensors: dict[str, Tensor]) -> Block:
        """Make a block of a group of sequences from what `_arrays` gave, on the device."""
        runs = self._sequences
        prefixes = runs.prefixes[group]
        wide = int(prefixes.max())
        long = int(runs.lengths[group].max())
        fused = wide + long > LONG
        places = prefixes, tensors["prefixes"]
        live = tensors.get("live")
        return Block(
            shape=(len(group), wide, long, wide + long),
            fused=fused,
            queries=tensors["queries"],
            keys=tensors["keys"],
            bias=self._bias(*places, long, fused),
            near=self._bias(*places, long, fused, self.window) if self.window else None,
            live=None if live is None else live.to(self._base.dtype),
            level=int(runs.levels[group[0]]),
            is_shared=bool(np.isin(group, runs.owner).any()),
            sharers=tensors.get("sharers"),
            cells=tensors.get("cells"),
            lengths=tensors.get("lengths") if "cells" in tensors else None,
        )

    def _bias(self, prefixes: Ints, moved: Tensor, long: int, fused: bool, window: int = 0) -> Tensor | None:
        """Make the attention mask, [S or 1, 1, Q, K]: zero where visible, else minus infinity; for the fused
        kernel true and false. A query sees the last `window` keys; with 0 all. moved: `prefixes` on the
        device.
        """
        wide = int(prefixes.max())
        if fused and not wide and not self._base.config.has_sinks:
            return None
        keys = torch.arange(wide + long, device=self._base.device)  # masks are made there: they may be large
        visible = (keys <= keys[wide:, None])[None, None]
        is_even = (prefixes == wide).all()
        if not is_even:
            visible = visible & ((keys < moved[:, None, None, None]) | (keys >= wide))
        if window:
            before = (moved[:1] if is_even else moved)[:, None]
            places = torch.where(keys < wide, keys, keys - wide + before)  # of keys, in their sequence
            visible = visible & (places[:, None] > places[:, wide:, None] - window)[:, None]
        if fused:
            return visible
        bias = torch.zeros(visible.shape, dtype=self._base.dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))
        kv = 1 if len(visible) == 1 else self.kv
        full = bias[:, :, None].expand(-1, kv, self.heads // self.kv, -1, -1)
        return full.reshape(len(visible) * kv, -1, wide + long)


def similar(sequences: Sequences) -> Iterator[Ints]:
    """Yield the indices of each block's sequences, level by level, no empty ones; longest first, ties in the
    given order.

    In a block the longest is at most a quarter and 8 tokens longer than the shortest. All have as much before
    them where the fused kernel works, so that one mask does for all, and where others share them, so that
    their keys lie where the others have theirs.
    """
    lengths = sequences.lengths
    prefixes = sequences.prefixes
    levels = sequences.levels
    shared = np.isin(np.arange(len(lengths)), sequences.owner)
    apart = np.where((prefixes + lengths > LONG) | shared, prefixes, 0)
    for level in range(int(levels.max(initial=0)) + 1):
        present = np.flatnonzero((levels == level) & (lengths > 0))
        order = present[np.lexsort((-lengths[present], apart[present]))]
        yield from _cut(order, lengths, prefixes, apart)


def _cut(order: Ints, lengths: Ints, prefixes: Ints, apart: Ints) -> Iterator[Ints]:
    """Cut sorted sequences into blocks; padding, too, takes keys, so short ones may make up a long block."""
    taken: list[int] = []
    widest = 0
    for index in order.tolist():
        first = taken[0] if taken else index
        longest = int(lengths[first])
        widest = max(widest, int(prefixes[index]))
        uneven = longest > lengths[index] * 5 // 4 + 8 or apart[index] != apart[first]
        if uneven or (longest + widest > LONG and prefixes[index] != prefixes[first]):
            yield np.array(taken)
            taken = []
            widest = int(prefixes[index])
        taken.append(index)
    if taken:
        yield np.array(taken)


def _write(target: Ints, places: Ints, start: int, live: np.ndarray) -> None:
    """Number the live cells: target[places] becomes their number among all cells, counted from `start`."""
    mask = np.broadcast_to(live, places.shape)
    target[places[mask]] = start + np.flatnonzero(mask)
