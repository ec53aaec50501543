"""The two passes over a micro-batch: forward for log-probabilities, forward and backward for gradients.

Logits exist for completion tokens only, and for at most `LOGITS` numbers at a time: the backward of one chunk ends
before the next chunk's logits are made, and the body of the model is walked back once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lorad.models.base import Base
from lorad.models.decoder import hidden, logits
from lorad.models.lora import LoraApply
from lorad.protocol.batch import LossStats, PolicyLoss, PolicyTargets
from lorad.rl.loss import TokenTargets, level_weights, loss_stats, token_logprobs, token_losses
from lorad.trainers.builtin.microbatch import Microbatch

LOGITS = 2**27
"""Numbers in one chunk of logits: 512 MiB in fp32."""


@torch.no_grad()
def score(base: Base, rows: Microbatch, lora: LoraApply | None, temperature: float) -> np.ndarray:
    """float32 [T]: the log-probability of each completion token of the micro-batch."""
    states = _predicting_states(base, rows, lora)
    parts = [
        token_logprobs(logits(base, states[chunk], lora), rows.targets[chunk], temperature)[0]
        for chunk in _chunks(base, rows)
    ]
    result: np.ndarray = torch.cat(parts).cpu().numpy()
    return result


def forward_backward(
    base: Base, rows: Microbatch, lora: LoraApply, targets: PolicyTargets, loss: PolicyLoss, normaliser: float
) -> LossStats:
    """Adds the gradient of sum(token losses) / normaliser to the leaves behind `lora`."""
    states = _predicting_states(base, rows, lora)
    cut = states.detach().requires_grad_()
    wanted = _token_targets(rows, targets, loss)
    stats = LossStats()
    for chunk in _chunks(base, rows):
        logprobs, entropy = token_logprobs(logits(base, cut[chunk], lora), rows.targets[chunk], loss.temperature)
        losses = token_losses(logprobs, wanted.at(chunk), loss)
        torch.autograd.backward(losses.loss.sum() / normaliser)
        stats += loss_stats(losses, entropy, normaliser)
    if states.requires_grad:
        torch.autograd.backward(states, cut.grad)
    return stats


def _predicting_states(base: Base, rows: Microbatch, lora: LoraApply | None) -> Tensor:
    """[T, hidden]: the last hidden state at the position that predicts each completion token."""
    return hidden(base, rows.ids, rows.positions, rows.attention, lora)[0].index_select(0, rows.predictors)


def _chunks(base: Base, rows: Microbatch) -> Iterator[slice]:
    size = max(1, LOGITS // base.config.vocab_size)
    return (slice(start, start + size) for start in range(0, rows.targets.numel(), size))


def _token_targets(rows: Microbatch, targets: PolicyTargets, loss: PolicyLoss) -> TokenTargets:
    device = rows.targets.device

    def per_token(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array[rows.where].astype(np.float32)).to(device)

    advantages = torch.from_numpy(targets.advantages[rows.samples].astype(np.float32)).to(device)
    return TokenTargets(
        advantages=advantages.repeat_interleave(rows.lengths),
        sampler=per_token(targets.sampler_logprobs),
        weights=level_weights(rows.lengths, loss.level),
        old=None if targets.old_logprobs is None else per_token(targets.old_logprobs),
        reference=None if targets.reference_logprobs is None else per_token(targets.reference_logprobs),
    )
