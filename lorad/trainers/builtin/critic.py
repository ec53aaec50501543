"""The two passes of a critic over a micro-batch: its values, and their gradients. No logits are made."""

import numpy as np
import torch
from torch import Tensor

from lorad.models.base import Base
from lorad.models.decoder import at_once
from lorad.protocol.batch import LossStats
from lorad.protocol.calls import ValueBackward
from lorad.rl.value_loss import value_losses, value_stats
from lorad.trainers.builtin.ahead import LayoutsAhead
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.passes import predicting_states, recomputing
from lorad.trainers.builtin.slot import Slot


@torch.no_grad()
def values(base: Base, slot: Slot, ahead: LayoutsAhead) -> np.ndarray:
    """Return the value at the position that predicts each target of the next micro-batch, float32 [M]."""
    _, rows = ahead.take()
    lora = SlotLora([slot], rows.rows, train=False)
    estimates = _values(predicting_states(base, rows, lora, at_once), *_head(slot))
    ahead.lay()
    numbers: np.ndarray = estimates.cpu().numpy()
    return numbers


def backward(base: Base, slot: Slot, work: ValueBackward, ahead: LayoutsAhead) -> LossStats:
    """Add the gradient of sum(token losses) / normaliser to the slot, for the next micro-batch. Return its
    statistics.
    """
    _, rows = ahead.take()
    lora = SlotLora([slot], rows.rows, train=True)
    run = recomputing(lora) if slot.recomputes(rows.ids.numel()) else at_once
    head = [weights.detach().requires_grad_() for weights in _head(slot)]
    estimates = _values(predicting_states(base, rows, lora, run), *head)
    losses, clipped = value_losses(estimates, work.targets, rows.pieces[0].targets, work.loss)
    torch.autograd.backward(losses.sum() / work.normaliser)
    grads = slot.views(slot.grads)
    for name, part in zip(slot.head, head, strict=True):
        assert part.grad is not None
        grads[name].add_(part.grad)
    ahead.lay()
    return value_stats(losses, clipped, work.normaliser)


def _head(slot: Slot) -> list[Tensor]:
    """Return weight [1, hidden] and bias [1], sharing the slot's memory."""
    weights = slot.views(slot.weights)
    return [weights[name] for name in slot.head]


def _values(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the values of states [M, hidden], fp32 [M]."""
    return torch.nn.functional.linear(states.float(), weight, bias)[:, 0]
