"""LoRA (arXiv 2106.09685) beside the fused base linears: y = W x + scale * B (A x)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from lorad.models.base import Base
from lorad.models.config import GROUPS, groups_of
from lorad.models.directory import linear_shapes

_Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
_Pair = tuple[torch.Tensor, torch.Tensor]
"""A fused (A [rank, in], B [out, rank]); the scale is already in B."""


class LoraApply(Protocol):
    """What the forward asks of an adapter."""

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the group's output with the adapter: y + delta(x); y itself when the adapter has nothing
        there.

        x: [tokens, in], y: [tokens, out] (fresh, contiguous: may be written to under no_grad).
        group: a key of `GROUPS`, or "lm_head" with layer = number of layers.
        """
        ...


def members(layer: int, group: str) -> tuple[str, ...]:
    """Hugging Face module names that make up a fused group, in the order of their output rows."""
    return (
        ("lm_head",)
        if group == "lm_head"
        else tuple(f"model.layers.{layer}.{name}" for name in GROUPS[group])
    )


def fused_groups(base: Base) -> list[tuple[int, str]]:
    """Return every (layer, group) of a base at which `LoraApply.apply` can be asked for a delta."""
    inner = [(layer, group) for layer in range(len(base.layers)) for group in groups_of(base.config)]
    return inner if base.config.tie_word_embeddings else [*inner, (len(base.layers), "lm_head")]


_numbers = itertools.count(1)


class FrozenLora:
    """An adapter version as the engine serves it: an own copy, cast to the base's dtype, that nothing
    mutates.

    tensors: `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank], numpy fp32, in
    whole pairs that fit the base (see `lorad.adapters.validate`). scale: alpha / rank, or alpha / sqrt(rank)
    for rslora. number: of no other one in this process.
    """

    def __init__(self, base: Base, tensors: Mapping[str, _Array], scale: float) -> None:
        shapes = linear_shapes(base.config)
        self.scale, self.number = scale, next(_numbers)
        self.pairs: dict[tuple[int, str], _Pair] = {}
        for place in fused_groups(base):
            pair = _fuse(members(*place), tensors, shapes, scale)
            if pair is not None:
                self.pairs[place] = (pair[0].to(base.device, base.dtype), pair[1].to(base.device, base.dtype))

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = self.pairs.get((layer, group))
        if pair is None:
            return y
        return y.addmm_(F.linear(x, pair[0]), pair[1].t())

    def nbytes(self) -> int:
        """Return the bytes that the copy holds."""
        return sum(t.numel() * t.element_size() for pair in self.pairs.values() for t in pair)


_Place = tuple[int, str]
"""(layer, fused group)"""

Signature = tuple[tuple[_Place, int], ...]
"""The places at which any of some adapters has something, each with the largest rank there."""


def signature(base: Base, loras: Sequence[FrozenLora | None]) -> Signature:
    """Return what the shapes of a `MixedLora` depend on beside the number of its adapters."""
    found = []
    for place in fused_groups(base):
        ranks = [lora.pairs[place][0].shape[0] for lora in loras if lora is not None and place in lora.pairs]
        if ranks:
            found.append((place, max(ranks)))
    return tuple(found)


def number_of(lora: FrozenLora | None) -> int:
    """0 for the bare base."""
    return 0 if lora is None else lora.number


class MixedLora:
    """Several frozen adapters (None: the bare base) in one batch, as two batched matmuls per group.

    Ranks and targets may differ: what is missing is zero. It holds copies, not the adapters. per: tokens that
    each has at most, tokens: that a forward has; with them `fill` and `assign` write where a captured step
    reads. 0: as many as there are.
    """

    def __init__(self, base: Base, loras: Sequence[FrozenLora | None], per: int = 0, tokens: int = 0) -> None:
        self.count, self.per, self.device = len(loras), per, base.device
        self.stacks: dict[_Place, _Pair] = {}
        for place, rank in signature(base, loras):
            pair = next(lora.pairs[place] for lora in loras if lora is not None and place in lora.pairs)
            a = pair[0].new_zeros(self.count, rank, pair[0].shape[1])
            self.stacks[place] = a, pair[1].new_zeros(self.count, pair[1].shape[0], rank)
        self.numbers = [0] * self.count
        self.fill(loras)
        self.gather: torch.Tensor | None = None
        self.place = torch.zeros(0, dtype=torch.int64, device=base.device)
        if per and self.count > 1:
            self.gather = torch.zeros(self.count * per, dtype=torch.int64, device=base.device)
            self.place = torch.zeros(tokens, dtype=torch.int64, device=base.device)

    def fill(self, loras: Sequence[FrozenLora | None]) -> None:
        """Serve these instead, adapter by adapter; their signature must be the one that was given first."""
        for index, lora in enumerate(loras):
            if self.numbers[index] != number_of(lora):
                for place, (a, b) in self.stacks.items():
                    _put(a[index], b[index], None if lora is None else lora.pairs.get(place))
        self.numbers = [number_of(lora) for lora in loras]

    def assign(self, owner: _Array) -> None:
        """owner[token], int64: the index of the adapter that each token of the next forwards uses.

        When the forwards have more tokens, what is added to the rest of them is of no adapter in particular.
        """
        if self.count == 1:
            return
        sizes = np.bincount(owner, minlength=self.count)
        per = self.per or int(sizes.max())
        order = np.argsort(owner, kind="stable")
        rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = np.empty(len(owner), np.int64)
        place[order] = owner[order] * per + rank
        gather = np.zeros(self.count * per, np.int64)
        gather[place] = np.arange(len(owner))
        found, home = (torch.from_numpy(array).to(self.device) for array in (gather, place))
        if not self.per:
            in_order = np.array_equal(gather, np.arange(len(owner)))  # and even: nothing to move
            self.gather, self.place = None if in_order else found, home
        else:
            assert self.gather is not None
            self.gather.copy_(found)
            self.place[: len(owner)] = home

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = self.stacks.get((layer, group))
        if pair is None:
            return y
        rows = x if self.gather is None else x.index_select(0, self.gather)
        low = torch.bmm(rows.view(self.count, -1, x.shape[-1]), pair[0].transpose(1, 2))
        if self.gather is None:
            y.view(self.count, -1, y.shape[-1]).baddbmm_(low, pair[1].transpose(1, 2))
            return y
        delta = torch.bmm(low, pair[1].transpose(1, 2)).view(-1, y.shape[-1])
        return y.add_(delta.index_select(0, self.place[: len(y)]))


def _put(a: torch.Tensor, b: torch.Tensor, pair: _Pair | None) -> None:
    a.zero_()
    b.zero_()
    if pair is not None:
        a[: pair[0].shape[0]] = pair[0]
        b[:, : pair[1].shape[1]] = pair[1]


def _fuse(
    modules: Sequence[str], tensors: Mapping[str, _Array], shapes: Mapping[str, tuple[int, int]], scale: float
) -> _Pair | None:
    present = [module for module in modules if f"{module}.lora_A.weight" in tensors]
    if not present:
        return None
    halves = {m: (tensors[f"{m}.lora_A.weight"], tensors[f"{m}.lora_B.weight"]) for m in present}
    ranks = sum(a.shape[0] for a, _ in halves.values())
    b = np.zeros((sum(shapes[module][0] for module in modules), ranks), dtype=np.float32)
    row = column = 0
    for module in modules:
        out = shapes[module][0]
        if module in halves:
            half = halves[module][1]
            b[row : row + out, column : column + half.shape[1]] = half * np.float32(scale)
            column += half.shape[1]
        row += out
    a = np.concatenate([a for a, _ in halves.values()])
    return torch.from_numpy(a), torch.from_numpy(b)
