"""Packed sequences laid side by side: which rows stand in which cell of which block, and back.

Sequences lie in rows one after another without padding; some share a prompt, which is a sequence too.
Attention wants rectangles, so sequences of similar lengths make up a block: only the attention of a few rows
is padded, nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorad.models.base import Base

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

LONG = 256
"""From so many keys on, a block uses the fused kernel, whose memory does not grow with queries x keys."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Runs of rows that attend causally to themselves and before that to a prompt, which is another of the
    runs.

    starts, lengths, owner: int64 [S]; owner is the index of the prompt among the runs, -1 for the prompts
        themselves.
    """

    starts: Ints
    lengths: Ints
    owner: Ints

    @property
    def prefixes(self) -> Ints:
        """Return how many tokens of a prompt come before each run."""
        return np.where(self.owner < 0, 0, self.lengths[self.owner])


@dataclass(frozen=True, slots=True)
class Block:
    """S sequences with Q queries and K = P + Q keys, the first P of them those of a shared prompt.

    queries: int64 [S * heads * Q], kv head by kv head: rows of q seen as [rows * heads, head_dim]. keys:
    int64 [S * kv * K], likewise of k and v. live: [S, 1, 1, Q, 1], zero where a query is padding; None when
    none is. sharers: int64 [S], the prompt of each sequence, counted in the order of the blocks; None of
    prompts.
    """

    shape: tuple[int, int, int, int]  # S, P, Q, K
    # which kernel, and so which bias: boolean [1, 1, Q, K], else [S * kv or 1, heads / kv * Q, K]
    fused: bool
    queries: Tensor
    keys: Tensor
    bias: Tensor | None  # None of fused prompts: the kernel knows what is causal
    live: Tensor | None
    sharers: Tensor | None


class Layout:
    """The blocks of one micro-batch, prompts first. out: int64 [rows * heads], where the output of each query
    head is among the outputs of all blocks; home: int64 [rows * kv], where each key head is among the keys of
    all blocks.
    """

    def __init__(self, base: Base, rows: int, sequences: Sequences) -> None:
        config = base.config
        self.heads, self.kv, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._base, self._sequences = base, sequences
        groups = list(similar(sequences))
        prompts = np.concatenate([g for g in groups if sequences.owner[g[0]] < 0])
        self.prompts = len(prompts)
        self.longest_prompt = int(sequences.lengths[prompts].max())
        self._rank = np.zeros(len(sequences.starts), np.int64)  # of each prompt, in the order of the blocks
        self._rank[prompts] = np.arange(len(prompts))
        out, home = np.zeros(rows * self.heads, np.int64), np.zeros(rows * self.kv, np.int64)
        self.blocks, outputs, keys = [], 0, 0
        for group in groups:
            block = self._block(group, out, home, outputs, keys)
            self.blocks.append(block)
            outputs, keys = outputs + block.queries.numel(), keys + block.keys.numel()
        self.out, self.home = self._tensor(out), self._tensor(home)

    def _block(self, group: Ints, out: Ints, home: Ints, outputs: int, keys: int) -> Block:
        """One block; writes where its cells are into `out` and `home`."""
        runs, rep = self._sequences, self.heads // self.kv
        lengths, owner, prefixes = runs.lengths[group], runs.owner[group], runs.prefixes[group]
        wide, long = int(prefixes.max()), int(lengths.max())
        own = _cells(runs.starts[group], lengths, long)
        seen = np.concatenate([_cells(runs.starts[owner], prefixes, wide), own], 1)
        query_heads = own[:, None, None] * self.heads + np.arange(self.heads).reshape(1, self.kv, rep, 1)
        key_heads = seen[:, None] * self.kv + np.arange(self.kv)[:, None]
        live = np.arange(long) < lengths[:, None]
        _write(out, query_heads, outputs, live[:, None, None])
        _write(home, key_heads, keys, np.pad(live, ((0, 0), (wide, 0)))[:, None])
        fused = wide + long > LONG
        return Block(
            shape=(len(group), wide, long, wide + long),
            fused=fused,
            queries=self._tensor(query_heads.ravel()),
            keys=self._tensor(key_heads.ravel()),
            bias=self._bias(prefixes, wide, long, fused),
            live=None if live.all() else self._tensor(live[:, None, None, :, None]).to(self._base.dtype),
            sharers=None if owner[0] < 0 else self._tensor(self._rank[owner]),
        )

    def _bias(self, prefixes: Ints, wide: int, long: int, fused: bool) -> Tensor | None:
        """Make the attention mask: zero where visible, else minus infinity; for the fused kernel true and
        false.
        """
        if fused and not wide:
            return None
        visible = self._visible(prefixes, wide, long)
        if fused:
            return visible
        bias = torch.zeros(visible.shape, dtype=self._base.dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))
        kv = 1 if len(visible) == 1 else self.kv
        full = bias[:, :, None].expand(-1, kv, self.heads // self.kv, -1, -1)
        return full.reshape(len(visible) * kv, -1, wide + long)

    def _visible(self, prefixes: Ints, wide: int, long: int) -> Tensor:
        """bool [S or 1, 1, Q, K]: which keys a query may attend to. Made on the device: it may be large."""
        keys = torch.arange(wide + long, device=self._base.device)
        visible = (keys <= keys[wide:, None])[None, None]
        if (prefixes == wide).all():
            return visible
        return visible & ((keys < self._tensor(prefixes)[:, None, None, None]) | (keys >= wide))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._base.device)


def similar(sequences: Sequences) -> Iterator[Ints]:
    """Indices of the sequences of each block, prompts first, no empty ones; longest first, ties in the given
    order.

    In a block the longest is at most a quarter and 8 tokens longer than the shortest; where the fused kernel
    works, all have prompts of one length, so that one mask does for all.
    """
    lengths, prefixes = sequences.lengths, sequences.prefixes
    for chosen in (sequences.owner < 0, (sequences.owner >= 0) & (lengths > 0)):
        some = np.flatnonzero(chosen)
        order = some[np.lexsort((-lengths[some], _apart(lengths, prefixes)[some]))]
        yield from _cut(order, lengths, prefixes)


def _apart(lengths: Ints, prefixes: Ints) -> Ints:
    """Return the key by which sequences share a block: the prompt's length for the fused kernel, else 0."""
    return np.where(prefixes + lengths > LONG, prefixes, 0)


def _cut(order: Ints, lengths: Ints, prefixes: Ints) -> Iterator[Ints]:
    """Sorted sequences as blocks; padding, too, takes keys, so short sequences may make up a long block."""
    apart = _apart(lengths, prefixes)
    taken: list[int] = []
    widest = 0
    for index in order.tolist():
        first = taken[0] if taken else index
        longest, widest = int(lengths[first]), max(widest, int(prefixes[index]))
        uneven = longest > lengths[index] * 5 // 4 + 8 or apart[index] != apart[first]
        if uneven or (longest + widest > LONG and prefixes[index] != prefixes[first]):
            yield np.array(taken)
            taken, widest = [], int(prefixes[index])
        taken.append(index)
    if taken:
        yield np.array(taken)


def _cells(starts: Ints, lengths: Ints, width: int) -> Ints:
    """[S, width]: the rows of each run, the last one repeated for padding."""
    cells: Ints = starts[:, None] + np.minimum(np.arange(width), np.maximum(lengths, 1)[:, None] - 1)
    return cells


def _write(target: Ints, places: Ints, start: int, live: np.ndarray) -> None:
    """target[places] = start, start + 1, … for the live cells."""
    mask = np.broadcast_to(live, places.shape)
    target[places[mask]] = start + np.flatnonzero(mask)
