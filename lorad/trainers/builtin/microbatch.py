"""A batch cut into micro-batches whose prompts are computed once for all their samples.

Tokens lie flat in one row: the prompts as a right-padded block [groups, prompt], then the inputs of the completions
(all but the last token of each) as a right-padded block [samples, completion]. Linears see one long row; only the
attention (`SharedPrompt`) knows of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.attention import causal
from lorad.protocol.batch import Batch

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """N padded tokens, T completion tokens of S samples."""

    ids: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [N]
    attention: SharedPrompt
    predictors: Tensor  # int64 [T]: which of the N predicts each completion token
    targets: Tensor  # int64 [T]
    where: Ints  # [T]: the place of each completion token among those of the batch
    samples: Ints  # [S]: indices into the batch
    lengths: Tensor  # int64 [S]


class SharedPrompt:
    """Prompts attend to themselves; a completion attends to the prompt of its group and to itself, causally."""

    def __init__(self, prompts: tuple[int, int], completions: tuple[int, int], owner: Tensor, mask: Tensor) -> None:
        self.prompts, self.completions = prompts, completions
        self.owner = owner  # int64 [samples]: the prompt of each sample
        self.mask = mask  # [samples, 1, completion, prompt + completion], added to the scores

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = self.prompts[0] * self.prompts[1]
        prompt_q, prompt_k, prompt_v = (t[0, :split].unflatten(0, self.prompts) for t in (q, k, v))
        prompt_out = causal(prompt_q, prompt_k, prompt_v).flatten(0, 1)
        if self.completions[1] == 0:
            return prompt_out.unsqueeze(0)
        own_q, own_k, own_v = (t[0, split:].unflatten(0, self.completions) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            own_q.transpose(1, 2),
            torch.cat([prompt_k.index_select(0, self.owner), own_k], 1).transpose(1, 2),
            torch.cat([prompt_v.index_select(0, self.owner), own_v], 1).transpose(1, 2),
            attn_mask=self.mask,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return torch.cat([prompt_out, out.transpose(1, 2).flatten(0, 1)]).unsqueeze(0)


def plan(batch: Batch, budget: int) -> Iterator[Ints]:
    """Sample indices of each micro-batch: at most `budget` padded tokens, or one sample that is longer by itself.

    Groups come shortest completions first, to pad little, ties in batch order: the same batch gives the same cut.
    """
    owner = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)
    longest = np.zeros(batch.group_sizes.size, np.int64)
    np.maximum.at(longest, owner, batch.completion_lengths)
    taken: list[int] = []
    prompt = completion = groups = 0
    for sample in np.lexsort((owner, batch.prompt_lengths[owner], longest[owner])).tolist():
        new_group = not taken or owner[taken[-1]] != owner[sample]
        prompt = max(prompt, int(batch.prompt_lengths[owner[sample]]))
        completion = max(completion, int(batch.completion_lengths[sample]))
        groups += new_group
        if taken and groups * prompt + (len(taken) + 1) * completion > budget:
            yield np.array(taken)
            taken, groups = [], 1
            prompt, completion = int(batch.prompt_lengths[owner[sample]]), int(batch.completion_lengths[sample])
        taken.append(sample)
    if taken:
        yield np.array(taken)


def pack(batch: Batch, samples: Ints, device: torch.device, dtype: torch.dtype) -> Microbatch:
    """The tensors of one micro-batch; `dtype` is that of the attention scores."""
    groups, owner = np.unique(
        np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)[samples], return_inverse=True
    )
    prompt_lengths = batch.prompt_lengths[groups].astype(np.int64)
    lengths = batch.completion_lengths[samples].astype(np.int64)
    prompt_starts = (np.cumsum(batch.prompt_lengths) - batch.prompt_lengths)[groups]
    starts = (np.cumsum(batch.completion_lengths) - batch.completion_lengths)[samples]
    width, tail = int(prompt_lengths.max()), int(lengths.max()) - 1

    prompts = _padded(batch.prompts, prompt_starts, prompt_lengths, width)
    inputs = _padded(batch.completions, starts, lengths - 1, tail)
    positions = np.concatenate(
        [np.tile(np.arange(width), len(groups)), (prompt_lengths[owner, None] + np.arange(tail)).ravel()]
    )
    # The last prompt token predicts the first token of each of its samples; token j of a completion predicts j + 1.
    sample, step = np.repeat(np.arange(len(samples)), lengths), _ranges(lengths)
    first = (owner * width + prompt_lengths[owner] - 1)[sample]
    predictors = np.where(step == 0, first, prompts.size + sample * tail + step - 1)
    where = starts[sample] + step

    def tensor(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

    visible = torch.from_numpy(_visible(prompt_lengths[owner], width, tail)).to(device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    return Microbatch(
        ids=tensor(np.concatenate([prompts.ravel(), inputs.ravel()])).unsqueeze(0),
        positions=tensor(positions),
        attention=SharedPrompt(prompts.shape, inputs.shape, tensor(owner), mask),
        predictors=tensor(predictors),
        targets=tensor(batch.completions[where]),
        where=where,
        samples=samples,
        lengths=tensor(lengths),
    )


def _ranges(lengths: Ints) -> Ints:
    """0 .. length - 1 for each length, one after another."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _padded(flat: np.ndarray, starts: Ints, lengths: Ints, width: int) -> np.ndarray:
    """[rows, width]: row i is flat[starts[i] : starts[i] + lengths[i]], padded on the right with token 0."""
    rows = np.zeros((len(starts), width), np.int64)
    row, column = np.repeat(np.arange(len(starts)), lengths), _ranges(lengths)
    rows[row, column] = flat[starts[row] + column]
    return rows


def _visible(prompt_lengths: Ints, width: int, tail: int) -> np.ndarray:
    """bool [samples, 1, tail, width + tail]: which keys a completion token may attend to."""
    prompt = np.arange(width) < prompt_lengths[:, None]
    own = np.tril(np.ones((tail, tail), bool))
    rows = len(prompt_lengths)
    return np.concatenate(
        [
            np.broadcast_to(prompt[:, None, None], (rows, 1, tail, width)),
            np.broadcast_to(own, (rows, 1, tail, tail)),
        ],
        axis=-1,
    )
