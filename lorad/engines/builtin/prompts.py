"""Prompts that several rows of a decode batch continue: their keys and values are kept once, and all rows of
a prompt attend to them in one product (Hydragen, arXiv 2402.05099).
"""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from lorad.models.attention import Beside
from lorad.models.base import Base
from lorad.models.kv import Before, KVCache, attend_in_part, even
from lorad.models.lora import moves
from lorad.models.ops import upload

_Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
NONE = -1
"""The slot of a row that holds its prompt itself."""


class PromptShape(NamedTuple):
    """What the shapes of a step depend on: slots, rows of each, and tokens of the longest prompt."""

    slots: int
    rows: int
    span: int


class SharedPrompts:
    """Keys and values of prompts, one slot each, and which row continues which.

    lengths: int64 [slots], the tokens of each; 0 where a slot is free.
    shape: None while no row has a prompt here.
    begins: the tokens that each row has in its prompt, in the order of the rows; 0 without one.
    """

    def __init__(self, base: Base) -> None:
        self.cache = KVCache(base, 0, 0)
        self.cache.states.layers.clear()  # each row has its own
        self.lengths: _Array = np.zeros(0, np.int64)
        self.shape: PromptShape | None = None
        self._slots: dict[Hashable, int] = {}
        device = base.device
        # Heads of a row lie together, and of a slot those of all its rows: these lead there, and back.
        self.begins, self._to_rows, self._to_slots = (
            torch.zeros(0, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._seen = torch.zeros(0, dtype=torch.int64, device=device)  # `lengths` on the device

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots

    @property
    def place(self) -> tuple[object, ...]:
        """Where it lies: it changes when anything has moved."""
        tensors = (self.begins, self._to_rows, self._to_slots, self._seen, *self.cache.layers[:1])
        return self.cache.shape, *(tensor.data_ptr() for tensor in tensors)

    def tokens(self, more: int = 0, longest: int = 0) -> int:
        """Return the tokens of the memory, once it has `more` prompts of up to `longest` tokens."""
        slots = max(self.cache.slots, len(self._slots) + more)
        return slots * max(self.cache.length, even(longest) if more else 0)

    def reserve(self, more: int, longest: int, spare: int) -> None:
        """Have room for so many more prompts; for none, and none that there are, give the memory back, if it
        is that of more than `spare` tokens.
        """
        slots = max(self.cache.slots, len(self._slots) + more)
        if more:
            self.cache.resize(slots, max(self.cache.length, even(longest)), self.cache.slots)
            self.lengths = np.pad(self.lengths, (0, slots - len(self.lengths)))
        elif not self._slots and self.tokens() > spare:
            self.cache.resize(0, 0, 0)
            self.lengths = self.lengths[:0]

    def put(self, key: Hashable, cache: KVCache, row: int, length: int) -> int:
        """Keep the first tokens of a row of another cache, unless they are here; returns the slot."""
        if key in self._slots:
            return self._slots[key]
        slot = int(np.flatnonzero(self.lengths == 0)[0])
        self._slots[key] = slot
        self.lengths[slot] = length
        for layer, source in zip(self.cache.layers, cache.layers, strict=True):
            layer[:, slot, :, length:].zero_()  # masked values must be finite
            layer[:, slot, :, :length] = source[:, row, :, :length]
        return slot

    def keep(self, slots: Iterable[int]) -> None:
        """Free all other slots."""
        left = set(slots)
        self._slots = {key: slot for key, slot in self._slots.items() if slot in left}
        self.lengths[[slot for slot in range(len(self.lengths)) if slot not in left]] = 0

    def assign(
        self, slots: _Array, capacity: int, padded: Callable[[int], int], spanned: Callable[[int], int]
    ) -> None:
        """Say which slot each row continues (`NONE`: none). capacity: rows that there can be. padded: what a
        number of slots or rows is rounded up to; spanned: what one of tokens is.
        """
        mine = np.flatnonzero(slots != NONE)
        self.shape = None
        if not len(mine):
            return
        owner = slots[mine]
        count = min(self.cache.slots, padded(int(owner.max()) + 1))
        per = padded(int(np.bincount(owner).max()))
        gather, place = moves(owner, count, per)
        heads = np.arange(self.cache.shape[2])
        begins = np.zeros(capacity, np.int64)
        to_rows = np.zeros((capacity, len(heads)), np.int64)
        begins[mine] = self.lengths[owner]
        to_rows[mine] = (place[:, None] // per * len(heads) + heads) * per + place[:, None] % per
        to_slots = mine[gather].reshape(count, 1, per) * len(heads) + heads[:, None]
        new = upload([begins, to_rows.ravel(), to_slots.ravel(), self.lengths], self.begins.device)
        self.begins = _put(self.begins, new[0])
        self._to_rows = _put(self._to_rows, new[1])
        self._to_slots = _put(self._to_slots, new[2])
        self._seen = _put(self._seen, new[3])
        span = min(self.cache.length, spanned(int(self.lengths[owner].max())))
        self.shape = PromptShape(count, per, span)

    def attention(self, positions: torch.Tensor, shape: PromptShape) -> Before:
        """Return what the first rows see of their prompts, in a step of this shape.

        positions: int64 [rows], of their new tokens.
        """
        slots, per, span = shape
        kv = self.cache.shape[2]
        rows = len(positions)
        device = positions.device
        to_slots = self._to_slots[: slots * kv * per]
        to_rows = self._to_rows[: rows * kv]
        ends = self._seen[:slots, None].clamp(min=1)  # softmax wants one, also in a free slot
        unseen = torch.arange(span, device=device) >= ends
        bias = torch.zeros(unseen.shape, dtype=self.cache.layers[0].dtype, device=device)
        bias = bias.masked_fill_(unseen, float("-inf"))[:, None, None]

        def within(beside: Beside, group: int) -> torch.Tensor:
            """Return the bias of a layer with a window, which each row has for itself: [slots, 1, per *
            group, span]. A window that reaches no prompt has the least number, as -inf has no softmax.
            """
            of_rows = to_slots.view(slots, kv, per)[:, 0].reshape(-1) // kv
            queries = positions.index_select(0, of_rows).view(slots, 1, per, 1)
            is_far = ~beside.near(queries, torch.arange(span, device=device))
            return bias.masked_fill(is_far, torch.finfo(bias.dtype).min).repeat_interleave(group, 2)

        def seen(layer: int, q: torch.Tensor, beside: Beside | None) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = self.cache.of(layer)[:, :slots, :, :span].unbind(0)
            group, dim = q.shape[2:]
            together = q.reshape(-1, group * dim).index_select(0, to_slots).view(slots, kv, per * group, dim)
            seen_by = within(beside, group) if beside is not None and beside.window else bias
            parts = attend_in_part(together, keys, values, seen_by, is_plain=beside is None)
            out, total = (part.reshape(slots * kv * per, -1).index_select(0, to_rows) for part in parts)
            return out.view(q.shape), total.view(*q.shape[:3], 1)

        return Before(seen, (self.begins[:rows] == 0)[:, None, None, None])


def _put(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write into a tensor, so that captured steps see it; into a larger one if it is too small."""
    if len(tensor) < len(new):
        tensor = tensor.new_zeros(1 << (len(new) - 1).bit_length())
    tensor[: len(new)] = new
    return tensor
