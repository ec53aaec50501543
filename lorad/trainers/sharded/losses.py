"""The loss of micro-batches, and what it said, added up over data-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lorad.protocol.batch import LossStats
from lorad.rl.loss import TokenTargets, level_weights, loss_stats, token_logprobs, token_losses
from lorad.trainers.base import GradientWork
from lorad.trainers.sharded.body import LossOf
from lorad.trainers.sharded.rows import Rows
from lorad.trainers.sharded.workers import DataParallel


class Losses:
    """`stats`: of the micro-batches whose loss was asked for on this rank."""

    def __init__(self, work: GradientWork, device: torch.device) -> None:
        self._work, self._device = work, device
        self.stats = LossStats()

    def of(self, rows: Rows) -> LossOf:
        """sum(token losses) / normaliser of one micro-batch, as a function of its logits [T, vocab]."""

        def loss_of(logits: Tensor) -> Tensor:
            if not rows.targets.numel():
                return logits.sum() * 0.0  # the graph is walked all the same: other ranks wait for this one
            work = self._work
            logprobs, entropy = token_logprobs(logits, rows.targets, work.loss.temperature)
            losses = token_losses(logprobs, self._targets(rows), work.loss)
            self.stats += loss_stats(losses._replace(loss=losses.loss.detach()), entropy, work.normaliser)
            return losses.loss.sum() / work.normaliser

        return loss_of

    def _targets(self, rows: Rows) -> TokenTargets:
        targets, lengths = (
            self._work.targets,
            self._work.batch.completion_lengths[rows.samples].astype(np.int64),
        )

        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(array, np.float32)).to(self._device)

        def tokens(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else moved(array[rows.places])

        return TokenTargets(
            advantages=moved(np.repeat(targets.advantages[rows.samples], lengths)),
            sampler=moved(targets.sampler_logprobs[rows.places]),
            weights=level_weights(torch.from_numpy(lengths), self._work.loss.level).to(self._device),
            old=tokens(targets.old_logprobs),
            reference=tokens(targets.reference_logprobs),
        )


def over_ranks(mine: LossStats, dp: DataParallel, device: torch.device) -> LossStats:
    """Return the statistics of all data-parallel ranks. Collective."""
    if dp.size == 1:
        return mine
    names = mine.__struct_fields__
    sums = torch.tensor([getattr(mine, name) for name in names], dtype=torch.float64, device=device)
    everyone = [torch.empty_like(sums) for _ in range(dp.size)]
    torch.distributed.all_gather(everyone, sums, group=dp.group)
    total = LossStats()
    for part in everyone:
        values = dict(zip(names, part.tolist(), strict=True))
        total += LossStats(**{**values, "tokens": int(values["tokens"])})
    return total
