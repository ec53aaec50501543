"""A batch cut into micro-batches whose prompts are computed once for all their samples.

Tokens lie flat in one row and without padding, slot by slot: the prompts of its groups, then the inputs of
its completions (all but the last token of each). A prompt with one completion is one sequence with it, as
nobody shares it. What several prompts begin with (a system prompt, the first tokens of a chat template) is a
sequence before them, see `stems.py`. Linears see one long row; only attention knows of sequences.

Two prompts, `1 2 3` with the samples `10 11 12` and `20 21`, and `4 5` with `30 31` and `40`, lie like this:

    place       0  1  2 |  3  4 |  5  6 |  7 |  8
    token       1  2  3 |  4  5 | 10 11 | 20 | 30
    position    0  1  2 |  0  1 |  3  4 |  3 |  2
    shares      nothing | none  |  the first prompt | the second

    target     10 11 12 20 21 30 31 40
    predictor   2  5  6  2  7  4  8  4   the places that predict them

The sample `40` has no token that predicts anything, and no sequence of its own to attend to.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from torch import Tensor

from lorad.models.base import Base
from lorad.models.experts import Replay, replayed
from lorad.models.ops import upload
from lorad.protocol.batch import Batch
from lorad.routes import unknown_like
from lorad.trainers.builtin.attention import PackedAttention
from lorad.trainers.builtin.blocks import Ints, Layout, Sequences
from lorad.trainers.builtin.stems import NO_STEMS, Stems, stems_of


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """Some samples of a batch that follow one another, of one slot.

    Attributes:
        same: What `_twins` says of the samples of the batch, int64 [S].
        stems: What its prompts begin with alike.
    """

    batch: Batch
    samples: slice
    same: Ints
    stems: Stems

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
        """Return where the completion tokens of the samples are among the batch's."""
        ends = np.cumsum(self.batch.completion_lengths)
        start = int(ends[self.samples.start - 1]) if self.samples.start else 0
        return slice(start, int(ends[self.samples.stop - 1]))

    @property
    def targets(self) -> slice:
        """Return where the targets of the samples are among the batch's."""
        ends = np.cumsum(self.batch.target_lengths)
        start = int(ends[self.samples.start - 1]) if self.samples.start else 0
        return slice(start, int(ends[self.samples.stop - 1]))

    @property
    def rows(self) -> int:
        """Count the tokens that the forward computes for this piece."""
        computed, _ = self.computed()
        prompts = self.batch.prompt_lengths[self.groups]
        lengths = self.batch.completion_lengths[self.samples][computed]
        return int(prompts.sum() + (lengths - 1).sum()) - self.stems.left_out

    def computed(self) -> tuple[Ints, Ints]:
        """Return which of the samples the forward computes, and for each sample which of these it is like."""
        _, firsts, own = np.unique(self.same[self.samples], return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return firsts[order], np.argsort(order)[own]


def _piece(batch: Batch, samples: slice, same: Ints, share: bool) -> BatchPiece:
    """Return a piece, whose prompts have stems where prompts may share anything."""
    piece = BatchPiece(batch, samples, same, NO_STEMS)
    if not share:
        return piece
    groups = piece.groups
    ends = np.cumsum(batch.prompt_lengths)[groups].tolist()
    widths = batch.prompt_lengths[groups].tolist()
    prompts = [batch.prompts[end - width : end] for end, width in zip(ends, widths, strict=True)]
    return replace(piece, stems=stems_of(prompts, piece.rows))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """N tokens in rows, of which U predict something, and M targets.

    Attributes:
        rows, parts, tokens: The ranges of each piece among the N, the U and the M.
        replay: Sends the N where the engine did; None where nothing is known of that.
        words: The V different ids, and which of them each of the N tokens is; None unless tokens are four
            times as many.
    """

    ids: Tensor  # int64 [1, N]
    words: tuple[Tensor, Tensor] | None  # int64 [V], int64 [N]
    positions: Tensor  # int64 [N]
    attention: PackedAttention
    leaving: Tensor  # int64 [U]: which of the N predict something
    places: Tensor  # int64 [M]: which of the U predicts each target
    targets: Tensor  # int64 [M]
    pieces: tuple[BatchPiece, ...]
    rows: tuple[slice, ...]
    parts: tuple[slice, ...]
    tokens: tuple[slice, ...]
    replay: Replay | None = None

    @property
    def predictors(self) -> Tensor:
        """Return int64 [M]: which of the N predicts each target."""
        return self.leaving[self.places]


def _twins(batch: Batch) -> Ints:
    """Return for each sample the first one of its group with the same tokens and routes, itself if there is
    none before it; int64 [S].
    """
    first: dict[tuple[int, bytes], int] = {}
    owner = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes).tolist()
    ends = np.cumsum(batch.completion_lengths)
    bounds = zip(owner, (ends - batch.completion_lengths).tolist(), ends.tolist(), strict=True)
    same = []
    for sample, (group, start, end) in enumerate(bounds):
        content = batch.completions[start:end].tobytes()
        if batch.routes is not None:
            content += batch.routes.completions[start : end - 1].tobytes()
        same.append(first.setdefault((group, content), sample))
    return np.array(same, np.int64)


def plan(batch: Batch, budget: int, share: bool, whole: bool = False) -> Iterator[BatchPiece]:
    """Yield the batch in its own order, in pieces of at most `budget` rows, or of one sample that has more by
    itself.

    Groups without samples are left out.

    Args:
        share: Whether samples of a group with the same tokens are computed once, and so are stems; dropout
            forbids it, as each has its own masks.
        whole: Whether groups are not cut; one that has more than the budget is a piece.
    """
    filled = batch.group_sizes > 0
    if not filled.all():
        tokens = np.repeat(filled, batch.prompt_lengths)
        routes = None if batch.routes is None else batch.routes.part(tokens, slice(None))
        sizes = {"prompt_lengths": batch.prompt_lengths[filled], "group_sizes": batch.group_sizes[filled]}
        batch = msgspec.structs.replace(batch, prompts=batch.prompts[tokens], routes=routes, **sizes)
    owner = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes).tolist()
    prompts = batch.prompt_lengths.tolist()
    lengths = batch.completion_lengths.tolist()
    same = _twins(batch) if share else np.arange(len(lengths))
    twins = same.tolist()

    def fresh(samples: range, computed: set[int]) -> int:
        """Count the rows of samples that are not computed yet, without the rows of their prompt."""
        return sum(lengths[twin] - 1 for twin in {twins[sample] for sample in samples} - computed)

    first = rows = 0
    computed: set[int] = set()
    ends = np.cumsum(batch.group_sizes).tolist() if whole else range(1, len(lengths) + 1)
    for unit in itertools.starmap(range, itertools.pairwise([0, *ends])):
        prompt = prompts[owner[unit.start]]
        more = fresh(unit, computed)
        if unit.start == first or owner[unit.start] != owner[unit.start - 1]:
            more += prompt
        if unit.start > first and rows + more > budget:
            yield _piece(batch, slice(first, unit.start), same, share)
            first = unit.start
            rows = 0
            computed = set()
            more = prompt + fresh(unit, computed)
        rows += more
        computed.update(twins[sample] for sample in unit)
    if lengths:
        yield _piece(batch, slice(first, len(lengths)), same, share)


def mixed(plans: Sequence[Iterator[BatchPiece]], budget: int) -> Iterator[dict[int, BatchPiece]]:
    """Yield micro-batches of the next pieces of several plans, by the plan's index, at most `budget` rows
    together.

    Pieces are never cut again, and a plan's stay in order, so that each plan fares as it would alone.
    """
    queue = [(index, iter(pieces)) for index, pieces in enumerate(plans)]
    joined: dict[int, BatchPiece] = {}
    rows = 0
    while queue:
        index, pieces = queue.pop(0)
        piece = next(pieces, None)
        if piece is None:
            continue
        if joined and (index in joined or rows + piece.rows > budget):
            yield joined
            joined = {}
            rows = 0
        joined[index] = piece
        rows += piece.rows
        queue.append((index, pieces))
    if joined:
        yield joined


@dataclass(frozen=True, slots=True)
class Laid:
    """A micro-batch on the host.

    Attributes:
        arrays: `ids`, `positions`, `leaving`, `places` and `targets` of the micro-batch, and its `words`,
            where it has any.
        kept: How many of the U belong to each piece and those before it.
        routes: Where the engine sent the N; None where nothing is known of that.
    """

    pieces: tuple[BatchPiece, ...]
    parts: Sequence["_Part"]
    arrays: Sequence[Ints]
    layout: Layout
    kept: Sequence[int]
    routes: np.ndarray | None

    def moved(self, base: Base) -> Microbatch:
        """Return it on the base's device. Call it once."""
        ids, positions, leaving, places, targets, *words = upload(self.arrays, base.device)
        return Microbatch(
            ids=ids.unsqueeze(0),
            words=(words[0], words[1]) if words else None,
            positions=positions,
            attention=PackedAttention(self.layout.move()),
            leaving=leaving,
            places=places,
            targets=targets,
            pieces=self.pieces,
            rows=_ranges_of([part.ids.size for part in self.parts]),
            parts=tuple(slice(*ends) for ends in itertools.pairwise([0, *self.kept])),
            tokens=_ranges_of([part.targets.size for part in self.parts]),
            replay=None if self.routes is None else replayed(self.routes, base.device),
        )


def pack(base: Base, pieces: Sequence[BatchPiece]) -> Microbatch:
    """Return the tensors of one micro-batch."""
    return lay(base, pieces).moved(base)


def lay(base: Base, pieces: Sequence[BatchPiece]) -> Laid:
    """Lay a micro-batch out, without asking the device for anything."""
    parts: list[_Part] = []
    row = run = 0
    for piece in pieces:
        parts.append(_part(piece, row, run))
        row += parts[-1].ids.size
        run += parts[-1].starts.size

    def joined(field: str) -> Ints:
        return np.concatenate([getattr(part, field) for part in parts])

    runs = Sequences(joined("starts"), joined("lengths"), joined("owner"))
    leaving, places = np.unique(joined("predictors"), return_inverse=True)
    words, which = np.unique(joined("ids"), return_inverse=True)
    arrays = [joined("ids"), joined("positions"), leaving, places.reshape(-1), joined("targets")]
    if len(words) * 4 <= row:
        arrays += [words, which]
    routes = None
    if (like := next((part.routes for part in parts if part.routes is not None), None)) is not None:
        routes = np.concatenate(
            [unknown_like(like, p.ids.size) if p.routes is None else p.routes for p in parts]
        )
    return Laid(
        pieces=tuple(pieces),
        parts=parts,
        arrays=[array.astype(np.int64, copy=False) for array in arrays],
        layout=Layout(base, row, runs),
        kept=np.searchsorted(leaving, np.cumsum([part.ids.size for part in parts])).tolist(),
        routes=routes,
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
    routes: np.ndarray | None


def _part(piece: BatchPiece, row: int, run: int) -> _Part:
    """Lay a piece out, as in the example at the top.

    Args:
        row: How many tokens lie before it in the micro-batch.
        run: How many sequences.
    """
    batch = piece.batch
    groups = piece.groups
    stems = piece.stems
    # 1. What is computed: stems, the own tokens of prompts, and all but the last token of each completion
    #    that no earlier one equals.
    prompt_lengths = batch.prompt_lengths[groups].astype(np.int64)
    in_stems = stems.before if stems else np.zeros_like(prompt_lengths)
    ends = np.cumsum(batch.prompt_lengths)
    prompt_tokens = slice(ends[groups.start] - prompt_lengths[0], ends[groups.stop - 1])
    is_own = _steps(prompt_lengths) >= np.repeat(in_stems, prompt_lengths)
    stem_steps = _steps(stems.lengths)
    starts_in_prompts = (np.cumsum(prompt_lengths) - prompt_lengths)[stems.source] + stems.starts
    stem_tokens = np.repeat(starts_in_prompts, stems.lengths) + stem_steps
    prompts = batch.prompts[prompt_tokens]
    completions = batch.completions[piece.tokens]
    lengths = batch.completion_lengths[piece.samples].astype(np.int64)
    last = np.cumsum(lengths) - 1
    computed, twin = piece.computed()
    is_input = np.isin(np.arange(len(lengths)), computed).repeat(lengths)
    is_input[last] = False
    # 2. Which of them predicts each target: token j of a completion predicts j + 1, and the last token of a
    #    prompt the first token of each of its samples.
    sizes = np.concatenate([stems.lengths, prompt_lengths - in_stems, lengths[computed] - 1])
    starts = np.cumsum(sizes) - sizes
    first_prompt = len(stems.lengths)
    group = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)[piece.samples] - groups.start
    steps = _steps(lengths)
    predictors = np.repeat(starts[first_prompt + len(prompt_lengths) :][twin], lengths) + steps - 1
    predictors[last + 1 - lengths] = starts[first_prompt:][group] + (prompt_lengths - in_stems)[group] - 1
    # 3. In which order they lie, so that the only completion of a prompt is one sequence with it.
    parents = np.concatenate([stems.owner, stems.of if stems else np.full(len(prompt_lengths), -1)])
    order, place, runs, sharers = _in_runs(parents, first_prompt, group[computed], sizes)
    # 4. What each token is, and where it stands in its own text.
    trained = slice(None) if batch.sampled is None else batch.sampled[piece.tokens]
    behind = (np.repeat(prompt_lengths[group], lengths) + steps)[is_input]
    routes = None
    if batch.routes is not None:
        of_piece = batch.routes.part(prompt_tokens, piece.tokens)
        parts = of_piece.prompts[stem_tokens], of_piece.prompts[is_own], of_piece.completions[is_input]
        routes = np.concatenate(parts)[order]
    return _Part(
        ids=np.concatenate([prompts[stem_tokens], prompts[is_own], completions[is_input]])[order],
        positions=np.concatenate(
            [np.repeat(stems.starts, stems.lengths) + stem_steps, _steps(prompt_lengths)[is_own], behind]
        )[order],
        predictors=row + place[predictors][trained],
        targets=completions[trained] if batch.labels is None else batch.labels[piece.targets],
        starts=row + np.cumsum(runs) - runs,
        lengths=runs,
        owner=np.where(sharers < 0, -1, sharers + run),
        routes=routes,
    )


def _in_runs(parents: Ints, first: int, owner: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Put the only completion of a prompt behind it.

    Returns the tokens in the order of their runs, the place of each token, the length of each run, and for
    each run the one that it shares, -1 for none.

    Args:
        parents: The stem that each stem and prompt shares.
        first: The index of the first prompt among these.
        owner: The prompt of each completion that is computed.
        sizes: The tokens of stems, prompts and completions.
    """
    count = len(parents)
    alone = (np.bincount(owner, minlength=count - first) == 1)[owner]
    own = np.where(alone, first + owner, count + np.cumsum(~alone) - 1)
    run = np.concatenate([np.arange(count), own])
    order = np.argsort(np.repeat(run, sizes), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    lengths = np.zeros(count + int((~alone).sum()), np.int64)
    np.add.at(lengths, run, sizes)
    return order, place, lengths, np.concatenate([parents, first + owner[~alone]])


def _steps(lengths: Ints) -> Ints:
    """Return 0 .. length - 1 for each length, one after another."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _ranges_of(sizes: Sequence[int]) -> tuple[slice, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))
