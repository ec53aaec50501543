"""A batch cut into micro-batches: sequences one after another in one row, each seeing itself alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorad.protocol.batch import Batch
from lorad.routes import unknown_like
from lorad.trainers.sharded.workers import DataParallel


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a batch."""

    sample: int
    tokens: np.ndarray  # int32, prompt and completion
    targets: np.ndarray  # which of the tokens are targets
    place: int  # of its first target among the targets of the batch
    routes: np.ndarray | None = None  # where the engine sent the tokens, if that is known
    labels: np.ndarray | None = None  # predicted in the place of the targets

    @property
    def predicted(self) -> np.ndarray:
        return self.tokens[self.targets] if self.labels is None else self.labels

    @property
    def inputs(self) -> int:
        """Return how many tokens are read; the last one is predicted, never read."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """N tokens in one row, of which M predict targets. Without sequences for a rank, N is 1 and M is 0."""

    ids: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]: from 0 for each sequence
    starts: Tensor  # int32 [sequences + 1]: where each sequence begins, and N
    predictors: Tensor  # int64 [M]: which of the N predicts each target
    targets: Tensor  # int64 [M]
    samples: np.ndarray  # int64 [sequences]: which of the batch's
    places: np.ndarray  # int64 [M]: of the targets, among those of the batch
    routes: np.ndarray | None = None  # [N, layers, per token]: where the engine sent them
    cut: "Cut | None" = None  # where these are the tokens of one rank of several

    @property
    def tokens(self) -> int:
        """Count those here, without padding."""
        return self.ids.shape[1] if self.cut is None else self.cut.tokens


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a row that one of several ranks has."""

    whole: Rows
    starts: tuple[int, ...]  # of the whole row's sequences, the padding as the last one, and its end
    targets: Tensor  # int64 [M]: which of the whole row's targets the part predicts
    tokens: int  # of the part, without padding
    group: DataParallel  # the ranks that share the row


def sequences(batch: Batch) -> list[Sample]:
    """Return every sample of the batch, in its order."""
    samples: list[Sample] = []
    place = start = 0
    if not batch.completion_lengths.size:
        return samples
    begin = 0  # of the prompt
    for prompt, completions in batch.groups():
        before = begin
        begin += len(prompt)
        for completion in completions:
            end = start + len(completion)
            routes = None
            if batch.routes is not None:
                of = batch.routes.part(slice(before, begin), slice(start, end))
                routes = np.concatenate([of.prompts, of.completions])
            targets = np.arange(len(prompt), len(prompt) + len(completion))
            targets = targets if batch.sampled is None else targets[batch.sampled[start:end]]
            tokens = np.concatenate([prompt, completion])
            after = place + targets.size
            labels = None if batch.labels is None else batch.labels[place:after]
            samples.append(Sample(len(samples), tokens, targets, place, routes, labels))
            place = after
            start = end
    return samples


def share(everything: Sequence[Sample], rank: int, size: int) -> list[Sample]:
    """Select a data-parallel rank's samples, by the batch alone: each rank has about as many tokens."""
    loads = [0] * size
    mine: list[Sample] = []
    for sequence in sorted(everything, key=lambda s: (-s.inputs, s.sample)):
        least = loads.index(min(loads))
        loads[least] += sequence.inputs
        if least == rank:
            mine.append(sequence)
    return sorted(mine, key=lambda s: s.sample)


def plan(mine: Sequence[Sample], budget: int, *, packs: bool) -> Iterator[list[Sample]]:
    """Yield micro-batches of at most `budget` tokens; a sequence is never cut."""
    row: list[Sample] = []
    tokens = 0
    for sequence in mine:
        if row and (tokens + sequence.inputs > budget or not packs):
            yield row
            row = []
            tokens = 0
        row.append(sequence)
        tokens += sequence.inputs
    if row:
        yield row


def pack(row: Sequence[Sample], device: torch.device) -> Rows:
    """Return the arrays of one micro-batch, which may be empty."""
    lengths = np.array([s.inputs for s in row] or [1], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([s.tokens[:-1] for s in row]) if row else np.zeros(1, np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths])
    like = next((s.routes for s in row if s.routes is not None), None)
    routes = None
    if like is not None:
        read = [unknown_like(like, s.inputs) if s.routes is None else s.routes[:-1] for s in row]
        routes = np.concatenate(read)
    empty = np.zeros(0, np.int64)
    predictors = [s.targets - 1 + at for s, at in zip(row, starts, strict=False)]
    places = [np.arange(s.place, s.place + s.targets.size) for s in row]

    def moved(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype).to(device, non_blocking=True)

    return Rows(
        ids=moved(ids)[None],
        positions=moved(positions)[None],
        starts=moved(starts, torch.int32),
        predictors=moved(np.concatenate([empty, *predictors])),
        targets=moved(np.concatenate([empty, *(s.predicted for s in row)])),
        samples=np.array([s.sample for s in row], np.int64),
        places=np.concatenate([empty, *places]),
        routes=routes,
    )


def cut(row: Rows, group: DataParallel) -> Rows:
    """Return the part of a row that this rank reads; padding at the end makes all parts equally long."""
    tokens = row.ids.shape[1]
    each = -(-tokens // group.size)
    begin = each * group.rank
    padding = each * group.size - tokens
    mine = slice(begin, begin + each)
    targets = ((row.predictors >= begin) & (row.predictors < begin + each)).nonzero()[:, 0]
    starts = row.starts.tolist()
    routes = row.routes
    if routes is not None:
        routes = np.concatenate([routes, unknown_like(routes, padding)])[mine]
    count = torch.arange(padding, device=row.ids.device)[None]
    return Rows(
        ids=torch.cat([row.ids, torch.zeros_like(count)], 1)[:, mine],
        positions=torch.cat([row.positions, count], 1)[:, mine],
        starts=row.starts,
        predictors=row.predictors[targets] - begin,
        targets=row.targets[targets],
        samples=row.samples,
        places=row.places[targets.cpu().numpy()],
        routes=routes,
        cut=Cut(
            whole=row,
            starts=(*starts, tokens + padding) if padding else tuple(starts),
            targets=targets,
            tokens=max(0, min(each, tokens - begin)),
            group=group,
        ),
    )
