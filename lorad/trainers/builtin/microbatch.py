"""A batch cut into micro-batches whose prompts are computed once for all their samples.

Tokens lie flat in one row and without padding, slot by slot: the prompts of its groups, then the inputs of
its completions (all but the last token of each). A prompt with one completion is one sequence with it, as
nobody shares it. What all prompts begin with (a system prompt, the first tokens of a chat template) is a
sequence before them, the stem, where that leaves out enough. Linears see one long row; only attention knows
of sequences.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from lorad.models.base import Base
from lorad.protocol.batch import Batch
from lorad.trainers.builtin.attention import PackedAttention
from lorad.trainers.builtin.blocks import Ints, Layout, Sequences

_WORTH = 20
"""A stem is made where it leaves out a row in so many: attention then has one more block, and a mask."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some samples of a batch that follow one another, of one slot.

    same: int64 [S of the batch], see `_twins`. stem: how many tokens the prompts begin with that are computed
    once for all of them.
    """

    batch: Batch
    samples: slice
    same: Ints
    stem: int = 0

    @property
    def groups(self) -> slice:
        """Return the slice of the groups that these samples belong to; the first and the last may be covered
        in part.
        """
        ends = np.cumsum(self.batch.group_sizes)
        first, last = np.searchsorted(ends, [self.samples.start, self.samples.stop - 1], "right").tolist()
        return slice(first, last + 1)

    @property
    def tokens(self) -> slice:
        """Return the completion tokens of the samples, among those of the batch."""
        ends = np.cumsum(self.batch.completion_lengths)
        start = int(ends[self.samples.start - 1]) if self.samples.start else 0
        return slice(start, int(ends[self.samples.stop - 1]))

    @property
    def targets(self) -> slice:
        """Return the targets of the samples, among those of the batch."""
        ends = np.cumsum(self.batch.target_lengths)
        start = int(ends[self.samples.start - 1]) if self.samples.start else 0
        return slice(start, int(ends[self.samples.stop - 1]))

    @property
    def rows(self) -> int:
        """Count the tokens that the forward computes for this piece."""
        computed, prompts = np.unique(self.same[self.samples]), self.batch.prompt_lengths[self.groups]
        rows = int(prompts.sum() + (self.batch.completion_lengths[computed] - 1).sum())
        return rows - self.stem * (prompts.size - 1)

    def with_stem(self) -> "Piece":
        """Return the piece with the longest stem that its prompts have, or none where that leaves out less
        than one row in _WORTH. The last token of each prompt stays its own.
        """
        batch, groups = self.batch, self.groups
        widths = batch.prompt_lengths[groups].astype(np.int64)
        most = int(widths.min()) - 1
        if len(widths) < 2 or most * (len(widths) - 1) * _WORTH < self.rows:
            return self
        starts = (np.cumsum(batch.prompt_lengths, dtype=np.int64) - batch.prompt_lengths)[groups]
        heads = batch.prompts[starts[:, None] + np.arange(most)]
        apart = (heads != heads[0]).any(0)
        stem = int(apart.argmax()) if apart.any() else most
        return self if stem * (len(widths) - 1) * _WORTH < self.rows else replace(self, stem=stem)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """N tokens in rows, of which U predict something, and M targets; `rows`, `parts` and `tokens` are the
    ranges of each piece among them.
    """

    ids: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [N]
    attention: PackedAttention
    leaving: Tensor  # int64 [U]: which of the N predict something
    places: Tensor  # int64 [M]: which of the U predicts each target
    targets: Tensor  # int64 [M]
    pieces: tuple[Piece, ...]
    rows: tuple[slice, ...]
    parts: tuple[slice, ...]
    tokens: tuple[slice, ...]

    @property
    def predictors(self) -> Tensor:
        """Return int64 [M]: which of the N predicts each target."""
        return self.leaving[self.places]


def _twins(batch: Batch) -> Ints:
    """int64 [S]: for each sample the first one of its group with the same tokens, itself if there is none
    before it.
    """
    first: dict[tuple[int, bytes], int] = {}
    owner = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes).tolist()
    ends = np.cumsum(batch.completion_lengths)
    bounds = zip(owner, (ends - batch.completion_lengths).tolist(), ends.tolist(), strict=True)
    keys = ((group, batch.completions[start:end].tobytes()) for group, start, end in bounds)
    return np.array([first.setdefault(key, sample) for sample, key in enumerate(keys)], np.int64)


def plan(batch: Batch, budget: int, share: bool, whole: bool = False) -> Iterator[Piece]:
    """Yield the batch in its own order, in pieces of at most `budget` rows, or of one sample that has more by
    itself.

    Groups without samples are left out. share: samples of a group with the same tokens are computed once
    (which dropout forbids: each has its own masks), and so is a stem. whole: groups are not cut, one that has
    more than the budget is a piece.
    """
    batch = _without_empty_groups(batch)
    owner = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes).tolist()
    prompts, lengths = batch.prompt_lengths.tolist(), batch.completion_lengths.tolist()
    same = _twins(batch) if share else np.arange(len(lengths))
    twins = same.tolist()

    def fresh(samples: range, there: set[int]) -> int:
        """Count the rows of samples that are not there; those of their prompt are not among them."""
        return sum(lengths[twin] - 1 for twin in {twins[sample] for sample in samples} - there)

    first = rows = 0
    there: set[int] = set()
    ends = np.cumsum(batch.group_sizes).tolist() if whole else range(1, len(lengths) + 1)
    for unit in itertools.starmap(range, itertools.pairwise([0, *ends])):
        prompt, more = prompts[owner[unit.start]], fresh(unit, there)
        if unit.start == first or owner[unit.start] != owner[unit.start - 1]:
            more += prompt
        if unit.start > first and rows + more > budget:
            piece = Piece(batch, slice(first, unit.start), same)
            yield piece.with_stem() if share else piece
            first, rows, there = unit.start, 0, set()
            more = prompt + fresh(unit, there)
        rows += more
        there.update(twins[sample] for sample in unit)
    if lengths:
        piece = Piece(batch, slice(first, len(lengths)), same)
        yield piece.with_stem() if share else piece


def _without_empty_groups(batch: Batch) -> Batch:
    there = batch.group_sizes > 0
    if there.all():
        return batch
    prompts = batch.prompts[np.repeat(there, batch.prompt_lengths)]
    sizes = {"prompt_lengths": batch.prompt_lengths[there], "group_sizes": batch.group_sizes[there]}
    return msgspec.structs.replace(batch, prompts=prompts, **sizes)


def mixed(plans: Sequence[Iterator[Piece]], budget: int) -> Iterator[dict[int, Piece]]:
    """Micro-batches of the next piece of several plans: index of the plan -> its piece, at most `budget` rows
    together.

    Pieces are never cut again and those of one plan stay in order, so that each plan fares as it would alone.
    """
    queue = [(index, iter(pieces)) for index, pieces in enumerate(plans)]
    joined: dict[int, Piece] = {}
    rows = 0
    while queue:
        index, pieces = queue.pop(0)
        piece = next(pieces, None)
        if piece is None:
            continue
        if joined and (index in joined or rows + piece.rows > budget):
            yield joined
            joined, rows = {}, 0
        joined[index] = piece
        rows += piece.rows
        queue.append((index, pieces))
    if joined:
        yield joined


def pack(base: Base, pieces: Sequence[Piece]) -> Microbatch:
    """Return the tensors of one micro-batch."""
    parts: list[_Part] = []
    row = run = 0
    for piece in pieces:
        parts.append(_part(piece, row, run))
        row, run = row + parts[-1].ids.size, run + parts[-1].starts.size

    def joined(field: str) -> Ints:
        return np.concatenate([getattr(part, field) for part in parts])

    def tensor(field: str) -> Tensor:
        return torch.from_numpy(joined(field).astype(np.int64, copy=False)).to(base.device)

    runs = Sequences(joined("starts"), joined("lengths"), joined("owner"))
    leaving, places = np.unique(joined("predictors"), return_inverse=True)
    kept = np.searchsorted(leaving, np.cumsum([part.ids.size for part in parts])).tolist()
    return Microbatch(
        ids=tensor("ids").unsqueeze(0),
        positions=tensor("positions"),
        attention=PackedAttention(Layout(base, row, runs)),
        leaving=torch.from_numpy(leaving).to(base.device),
        places=torch.from_numpy(places.reshape(-1)).to(base.device),
        targets=tensor("targets"),
        pieces=tuple(pieces),
        rows=_ranges_of([part.ids.size for part in parts]),
        parts=tuple(slice(*ends) for ends in itertools.pairwise([0, *kept])),
        tokens=_ranges_of([part.targets.size for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece as arrays, its rows and runs numbered from where it lies in the micro-batch."""

    ids: Ints
    positions: Ints
    predictors: Ints
    targets: Ints
    starts: Ints
    lengths: Ints
    owner: Ints


def _part(piece: Piece, row: int, run: int) -> _Part:
    batch, groups, samples = piece.batch, piece.groups, piece.samples
    tokens = batch.completions[piece.tokens]
    stem = np.full(1 if piece.stem else 0, piece.stem)
    widths = batch.prompt_lengths[groups].astype(np.int64)  # of the prompts' own tokens: the stem is before
    ends = np.cumsum(batch.prompt_lengths)
    prompts = batch.prompts[ends[groups.start] - widths[0] : ends[groups.stop - 1]]
    own = _steps(widths) >= piece.stem
    widths -= piece.stem
    lengths = batch.completion_lengths[samples].astype(np.int64)
    owner = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)[samples] - groups.start
    computed, twin = _firsts(piece.same[samples])
    sizes = np.concatenate([stem, widths, lengths[computed] - 1])
    starts = np.cumsum(sizes) - sizes
    first = len(stem)  # of the prompts, among the runs
    step, last = _steps(lengths), np.cumsum(lengths) - 1
    # The last prompt token predicts the first token of each of its samples; token j of a completion predicts
    # j + 1.
    predictors = np.repeat(starts[first + len(widths) :][twin], lengths) + step - 1
    predictors[last + 1 - lengths] = (starts[first:][: len(widths)] + widths - 1)[owner]
    inputs = np.isin(np.arange(len(lengths)), computed).repeat(lengths)
    inputs[last] = False
    order, place, runs, sharers = _in_runs(stem, widths, owner[computed], sizes)
    trained = slice(None) if batch.sampled is None else batch.sampled[piece.tokens]
    after = (np.repeat(widths[owner], lengths) + step)[inputs]
    positions = np.concatenate([_steps(stem), piece.stem + _steps(widths), piece.stem + after])
    return _Part(
        ids=np.concatenate([prompts[: piece.stem], prompts[own], tokens[inputs]])[order],
        positions=positions[order],
        predictors=row + place[predictors][trained],
        targets=tokens[trained],
        starts=row + np.cumsum(runs) - runs,
        lengths=runs,
        owner=np.where(sharers < 0, -1, sharers + run),
    )


def _in_runs(stem: Ints, widths: Ints, owner: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Put the only completion of a prompt behind it: (tokens in the order of their runs, the place of each
    token, the length of each run, for each run the one that it shares, -1 for none).

    stem: its length, if there is one. widths: of the prompts. owner: of each completion that is computed.
    sizes: of stem, prompts and completions.
    """
    first, count = len(stem), len(stem) + len(widths)
    alone = (np.bincount(owner, minlength=len(widths)) == 1)[owner]
    own = np.where(alone, first + owner, count + np.cumsum(~alone) - 1)
    run = np.concatenate([np.arange(count), own])
    order = np.argsort(np.repeat(run, sizes), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    lengths = np.zeros(count + int((~alone).sum()), np.int64)
    np.add.at(lengths, run, sizes)
    shared = np.concatenate([np.full(first, -1), np.full(len(widths), first - 1), first + owner[~alone]])
    return order, place, lengths, shared


def _firsts(same: Ints) -> tuple[Ints, Ints]:
    """(where each value is first, in that order; for each value of `same` which of these is its own)."""
    _, found, own = np.unique(same, return_index=True, return_inverse=True)
    order = np.argsort(found)
    return found[order], np.argsort(order)[own]


def _steps(lengths: Ints) -> Ints:
    """0 .. length - 1 for each length, one after another."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _ranges_of(sizes: Sequence[int]) -> tuple[slice, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))
