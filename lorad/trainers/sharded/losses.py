"""The policy's loss on one rank, micro-batch by micro-batch, and the statistics that all ranks add up."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lorad.protocol.batch import LossStats
from lorad.protocol.calls import ForwardBackward
from lorad.rl.loss import (
    TokenLogprobs,
    TokenTargets,
    loss_stats,
    sequence_ratios,
    token_losses,
    token_targets,
)
from lorad.trainers.sharded.head import RowLoss
from lorad.trainers.sharded.rows import Rows
from lorad.trainers.sharded.workers import DataParallel


class Losses:
    """The losses of this rank's micro-batches.

    Where the loss returns them, `logprobs` are of all targets, [M], with 0 for those of other ranks.
    """

    def __init__(self, work: ForwardBackward, device: torch.device) -> None:
        self.work = work
        self.device = device
        self.stats = LossStats()
        size = work.batch.targets.size
        self.logprobs = torch.zeros(size, device=device) if work.loss.returns_logprobs else None

    def of(self, rows: Rows, collect: Callable[[], None]) -> RowLoss:
        """Return the loss of one micro-batch, sum(token losses) / normaliser. For `collect` see `RowLoss`."""
        return _PolicyLoss(self, rows, collect)


class _PolicyLoss(RowLoss):
    def __init__(self, losses: Losses, rows: Rows, collect: Callable[[], None]) -> None:
        self._losses = losses
        self._rows = rows
        self._collect = collect
        self._work = losses.work
        loss = self._work.loss
        self.temperature = loss.temperature
        self.has_bonus = bool(loss.entropy_coef)
        self.looks_ahead = loss.is_of_samples and self._work.targets.sequence_log_ratios is None
        self._targets = token_targets(self._work.targets, rows.places, losses.device)

    def settle(self, logprobs: Tensor) -> None:
        self._targets = self._settled(logprobs)

    def _settled(self, logprobs: Tensor) -> TokenTargets:
        """Return the targets with the ratios of whole samples, where the loss has them.

        Collective over ranks that have parts of the same samples.
        """
        work = self._work
        rows = self._rows
        cut = rows.cut
        targets = self._targets
        lengths = torch.from_numpy(work.batch.target_lengths[rows.samples].astype(np.int64))
        if cut is not None and work.loss.is_of_samples and targets.sequence is None:
            mine = logprobs
            logprobs = torch.zeros(cut.whole.targets.numel(), device=logprobs.device)
            logprobs[cut.targets] = mine
            cut.group.add_up(logprobs)
            targets = token_targets(work.targets, cut.whole.places, self._losses.device)
        settled = sequence_ratios(logprobs, targets, work.loss, lengths.to(self._losses.device))
        return settled if targets is self._targets or cut is None else settled.at(cut.targets)

    def of(self, likely: TokenLogprobs, tokens: slice) -> Tensor:
        losses = token_losses(likely.logprobs, self._targets.at(tokens), self._work.loss, likely.entropy)
        return losses.loss.sum() / self._work.normaliser

    def collect(self) -> None:
        self._collect()

    @torch.no_grad()
    def note(self, likely: TokenLogprobs) -> None:
        losses = self._losses
        rows = self._rows
        work = self._work
        settled = self._settled(likely.logprobs)
        if not rows.targets.numel():
            return
        if losses.logprobs is not None:
            losses.logprobs[torch.from_numpy(rows.places).to(losses.device)] = likely.logprobs
        of_tokens = token_losses(likely.logprobs, settled, work.loss, likely.entropy)
        losses.stats += loss_stats(of_tokens, likely.entropy, likely.correct, work.normaliser)


def over_ranks(mine: LossStats, dp: DataParallel, device: torch.device) -> LossStats:
    """Return the statistics of all data-parallel ranks. Collective."""
    if dp.size == 1:
        return mine
    names = mine.__struct_fields__
    values = [getattr(mine, name) for name in names]
    sums = torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float64, device=device
    )
    everyone = [torch.empty_like(sums) for _ in range(dp.size)]
    dist.all_gather(everyone, sums, group=dp.group)
    total = LossStats()
    for part in everyone:
        stats = dict(zip(names, part.tolist(), strict=True))
        correct = None if math.isnan(stats["correct"]) else stats["correct"]
        total += LossStats(**{**stats, "tokens": int(stats["tokens"]), "correct": correct})
    return total
