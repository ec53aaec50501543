"""LoRA (arXiv 2106.09685) beside the fused base linears: y = W x + scale * B (A x)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.base import Base
from lorad.models.config import GROUPS
from lorad.models.directory import linear_shapes

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Pair = tuple[Tensor, Tensor]
"""A fused (A [rank, in], B [out, rank]); the scale is already in B."""


class LoraApply(Protocol):
    """What the forward asks of an adapter."""

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> Tensor:
        """The group's output with the adapter: y + delta(x); y itself when the adapter has nothing there.

        x: [tokens, in], y: [tokens, out] (fresh, contiguous: may be written to under no_grad).
        group: a key of `GROUPS`, or "lm_head" with layer = number of layers.
        """
        ...


def members(layer: int, group: str) -> tuple[str, ...]:
    """Hugging Face module names that make up a fused group, in the order of their output rows."""
    return ("lm_head",) if group == "lm_head" else tuple(f"model.layers.{layer}.{name}" for name in GROUPS[group])


def fused_groups(base: Base) -> list[tuple[int, str]]:
    """Every (layer, group) of a base at which `LoraApply.apply` can be asked for a delta."""
    inner = [(layer, group) for layer in range(len(base.layers)) for group in GROUPS]
    return inner if base.config.tie_word_embeddings else [*inner, (len(base.layers), "lm_head")]


class FrozenLora:
    """An adapter version as the engine serves it: an own copy, cast to the base's dtype, that nothing mutates.

    tensors: `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank], numpy fp32, in whole pairs
    that fit the base (see `lorad.adapters.validate`). scale: alpha / rank, or alpha / sqrt(rank) for rslora.
    """

    def __init__(self, base: Base, tensors: Mapping[str, Array], scale: float) -> None:
        shapes = linear_shapes(base.config)
        self.pairs: dict[tuple[int, str], Pair] = {}
        for place in fused_groups(base):
            pair = _fuse(members(*place), tensors, shapes, scale)
            if pair is not None:
                self.pairs[place] = (pair[0].to(base.device, base.dtype), pair[1].to(base.device, base.dtype))

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> Tensor:
        pair = self.pairs.get((layer, group))
        if pair is None:
            return y
        return y.addmm_(F.linear(x, pair[0]), pair[1].t())

    def nbytes(self) -> int:
        """Bytes that the copy holds."""
        return sum(t.numel() * t.element_size() for pair in self.pairs.values() for t in pair)


class MixedLora:
    """Several frozen adapters (None: the bare base) in one batch, as two batched matmuls per group.

    owner[token] is the index into `loras` of that row of x. Ranks and targets may differ: missing ones are zeros.
    """

    def __init__(self, base: Base, loras: Sequence[FrozenLora | None], owner: Sequence[int]) -> None:
        self.stacks: dict[tuple[int, str], Pair] = {}
        for place in fused_groups(base):
            found = [lora.pairs.get(place) if lora is not None else None for lora in loras]
            if any(pair is not None for pair in found):
                self.stacks[place] = _stack(found)
        self.loras, self.count = tuple(loras), len(loras)
        self.assign(owner)

    def assign(self, owner: Sequence[int]) -> None:
        """Says which adapter each token of the next forwards uses."""
        rows = np.asarray(owner, dtype=np.int64)
        sizes = np.bincount(rows, minlength=self.count)
        order = np.argsort(rows, kind="stable")
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = np.empty(len(rows), dtype=np.int64)
        place[order] = rows[order] * sizes.max() + rank
        gather = np.zeros(self.count * int(sizes.max()), dtype=np.int64)
        gather[place] = np.arange(len(rows))
        device = next(iter(self.stacks.values()))[0].device if self.stacks else torch.device("cpu")
        sorted_evenly = len(gather) == len(rows) and bool((gather == np.arange(len(rows))).all())
        self.gather = None if sorted_evenly else torch.from_numpy(gather).to(device)
        self.place = torch.from_numpy(place).to(device)

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> Tensor:
        pair = self.stacks.get((layer, group))
        if pair is None:
            return y
        rows = x if self.gather is None else x.index_select(0, self.gather)
        low = torch.bmm(rows.view(self.count, -1, x.shape[-1]), pair[0].transpose(1, 2))
        if self.gather is None:
            y.view(self.count, -1, y.shape[-1]).baddbmm_(low, pair[1].transpose(1, 2))
            return y
        delta = torch.bmm(low, pair[1].transpose(1, 2)).view(-1, y.shape[-1])
        return y.add_(delta.index_select(0, self.place))


def _stack(pairs: Sequence[Pair | None]) -> Pair:
    present = [pair for pair in pairs if pair is not None]
    rank = max(a.shape[0] for a, _ in present)
    a0, b0 = present[0]
    a = a0.new_zeros(len(pairs), rank, a0.shape[1])
    b = b0.new_zeros(len(pairs), b0.shape[0], rank)
    for index, pair in enumerate(pairs):
        if pair is not None:
            a[index, : pair[0].shape[0]] = pair[0]
            b[index, :, : pair[1].shape[1]] = pair[1]
    return a, b


def _fuse(
    modules: Sequence[str], tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, int]], scale: float
) -> Pair | None:
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
