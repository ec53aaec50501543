"""The states of sequences being decoded, beside their keys and values: one slot per sequence."""

from collections.abc import Sequence

import torch

from lorad.models.base import Base
from lorad.models.delta.net import State


def bytes_per_row(base: Base) -> int:
    """Return the bytes of one sequence's states in all layers, however long it is."""
    sizes = base.config.delta
    return 0 if sizes is None else sizes.state_bytes(base.dtype.itemsize)


class States:
    """The states of each layer that has a gated delta net, by its number; of other bases there are none."""

    def __init__(self, base: Base, slots: int) -> None:
        self.layers: dict[int, State] = {}
        sizes = base.config.delta
        for layer in () if sizes is None else sorted(sizes.layers):
            assert sizes is not None
            shape = slots, sizes.value_heads, sizes.key_dim, sizes.value_dim
            self.layers[layer] = State(
                torch.zeros(shape, device=base.device),
                torch.zeros(slots, sizes.kernel - 1, sizes.mixed, dtype=base.dtype, device=base.device),
            )

    def resize(self, slots: int, used: int) -> None:
        """Make room for so many, keeping the first `used`; layer by layer."""
        for layer, state in self.layers.items():
            resized = State(*(part.new_zeros(slots, *part.shape[1:]) for part in state))
            for new, old in zip(resized, state, strict=True):
                new[:used] = old[:used]
            self.layers[layer] = resized

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots `sources` over slots `targets`, both int64."""
        for state in self.layers.values():
            for part in state:
                part[targets] = part[sources]

    def fill(self, slots: slice | torch.Tensor, other: "States", rows: torch.Tensor) -> None:
        """Make slots copies of the slots `rows` (int64) of another: one prompt, many samples."""
        for layer, state in self.layers.items():
            for part, source in zip(state, other.layers[layer], strict=True):
                part[slots] = source.index_select(0, rows)

    def kept(self, slot: int) -> list[torch.Tensor]:
        """Return a copy of a slot, see `restore`."""
        return [part[slot].clone() for state in self.layers.values() for part in state]

    def restore(self, slot: int, copies: Sequence[torch.Tensor]) -> None:
        parts = [part for state in self.layers.values() for part in state]
        for part, copy in zip(parts, copies, strict=True):
            part[slot] = copy
