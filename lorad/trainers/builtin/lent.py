"""Memory that an engine lends while a micro-batch is computed: what its pass keeps lies there."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from lorad.models.base import Base
from lorad.trainers.builtin.slot import Slot

_LEAST = 1 << 16  # bytes: smaller tensors stay where they are
_ALIGNED = 512  # bytes


class CacheLender(NamedTuple):
    """Who lends, and what that is worth.

    Attributes:
        lend: Returns memory, flat and uint8, until the next call of the engine; None while it needs it.
            What of its budget it has not taken is free on the device.
        bytes: The budget.
        token: The bytes that a token of a pass keeps.
        dropout: How many more with dropout, or DoRA.
    """

    lend: Callable[[], Sequence[Tensor] | None]
    bytes: int
    token: int
    dropout: int

    def arena(self, base: Base, slots: Sequence[Slot], tokens: int) -> "Arena | None":
        """Return where a micro-batch of so many tokens keeps what else it would recompute; None where there
        is no room for that, or none now.
        """
        more = any(slot.spec.adapter.dropout or slot.spec.adapter.dora for slot in slots)
        lent = self.bytes // (self.token + self.dropout * more)
        if any(slot.recomputes(tokens, lent) for slot in slots) or (parts := self.lend()) is None:
            return None
        weights = (weight for _, weight in base.weights())
        return Arena(parts, [*weights, base.cos, base.sin, *(slot.weights for slot in slots)])


class Arena:
    """Keeps copies of what a forward saves in memory that was lent, as far as there is room; the rest, and
    what is there anyway, stays where it is.
    """

    def __init__(self, parts: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        self._parts = [part for part in parts if part.numel() >= _LEAST]
        self._used = [0] * len(self._parts)
        self._own = {tensor.untyped_storage()._cdata for tensor in own}

    def kept(self) -> AbstractContextManager[None]:
        """Have what is saved inside of the block lie here."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._keep, _as_it_is)
        return hooks

    @torch.no_grad()
    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < _LEAST or tensor.untyped_storage()._cdata in self._own:
            return tensor
        for number, (part, used) in enumerate(zip(self._parts, self._used, strict=True)):
            if part.numel() - used >= tensor.nbytes and part.device == tensor.device:
                self._used[number] += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
                place = part[used : used + tensor.nbytes]
                return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return tensor

    @property
    def used(self) -> int:
        """Return the bytes that are kept here."""
        return sum(self._used)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
