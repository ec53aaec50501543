"""LoRA (arXiv 2106.09685) beside the fused base linears: y = W x + scale * B (A x).

With DoRA (arXiv 2402.09353) it is y = c * (W x + scale * B (A x)), and c = m / |W + scale B A| per output
row; a bias is added after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from lorad.adapters.adapter import MAGNITUDE
from lorad.models.base import Base, Weight
from lorad.models.config import groups_of, modules_in
from lorad.models.directory import linear_shapes
from lorad.models.ops import upload
from lorad.models.products.forms import ends_of, grouped

_Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
_ROWS = 4096  # of a weight that are fp32 at once
_EXPERTS = "experts."  # begins the groups of experts
_Place = tuple[int, str]
"""(layer, fused group)"""
EVEN_RANK = 8
"""`F.grouped_mm` takes ranks on a GPU that are multiples of this."""
_Pair = tuple[torch.Tensor, torch.Tensor]
"""A fused (A [rank, in], B [out, rank]); the scale is already in B, and c of DoRA."""
_Gain = tuple[torch.Tensor, torch.Tensor]
"""c of DoRA, [out] in fp32, and what it leaves of the bias, (1 - c) * bias: c * y + that is without c on the
bias."""


class LoraApply(Protocol):
    """What the forward asks of an adapter."""

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the group's output with the adapter: y + delta(x); y itself when the adapter has nothing
        there.

        Args:
            group: One of `groups_of`, or "lm_head" with layer = number of layers.
            x: The input, [tokens, in].
            y: The output of the base, [tokens, out], fresh and contiguous: under no_grad it may be written
                to.
        """
        ...

    def reaches(self, layer: int, group: str) -> bool:
        """Return whether the adapter has something there; see `apply`."""
        ...

    def has_experts(self, layer: int) -> bool:
        """Return whether the adapter has something at any expert of a layer."""
        ...

    def routed(self, layer: int, tokens: torch.Tensor, ends: torch.Tensor) -> RoutedLora:
        """Return what the experts of a layer get.

        Args:
            tokens: The token of each row, sorted by expert and then by token, int64 [S].
            ends: Where the rows of each expert end, int32 [experts].
        """
        ...


class RoutedLora(Protocol):
    """What one layer's experts ask of an adapter."""

    def product(self, linear: str, x: torch.Tensor, weights: Weight, ends: torch.Tensor) -> torch.Tensor:
        """Return what `grouped` does, with the adapter, for the linear `gate_up` or `down`."""
        ...


def layers_with_experts(places: Iterable[tuple[int, str]]) -> frozenset[int]:
    """Return the layers of which some expert is among the places (layer, group)."""
    return frozenset(layer for layer, group in places if group.startswith(_EXPERTS))


def members(base: Base, layer: int, group: str) -> tuple[str, ...]:
    """Return the Hugging Face modules that make up a fused group, in the order of their output rows."""
    if group == "lm_head":
        return ("lm_head",)
    return tuple(
        f"{base.config.prefix}layers.{layer}.{name}" for name in modules_in(base.config, layer, group)
    )


def fused_groups(base: Base) -> list[tuple[int, str]]:
    """Return every (layer, group) of a base at which `LoraApply.apply` can be asked for a delta."""
    inner = [(layer, group) for layer in range(len(base.layers)) for group in groups_of(base.config, layer)]
    return inner if base.config.tie_word_embeddings else [*inner, (len(base.layers), "lm_head")]


def weight_at(base: Base, layer: int, group: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight [out, in] and the bias of a fused linear that is of no expert."""
    if group == "lm_head":
        return base.head, None
    its = base.layers[layer]
    if group.startswith("shared."):
        assert its.experts is not None
        return getattr(its.experts, group.replace(".", "_")), None
    return getattr(its, group), getattr(its, f"{group}_bias")


@torch.no_grad()
def row_norms(
    weight: torch.Tensor, b: torch.Tensor | None = None, a: torch.Tensor | None = None
) -> torch.Tensor:
    """Return |W + B A| of each row, or |W| without B and A, [out] in fp32. The scale is in B."""
    norms = []
    for start in range(0, len(weight), _ROWS):
        rows = weight[start : start + _ROWS].float()
        if b is not None and a is not None:
            rows = torch.addmm(rows, b[start : start + _ROWS].float(), a.float())
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.cat(norms)


_numbers = itertools.count(1)


class FrozenLora:
    """An adapter version as the engine serves it: an own copy, cast to the base's dtype, that nothing
    mutates.

    No other one in this process has its `number`.

    Args:
        tensors: A whole adapter that fits the base (see `lorad.adapters.validate`), in numpy fp32:
            `<module>.lora_A.weight` [rank, in], `<module>.lora_B.weight` [out, rank], and with DoRA
            `<module>.lora_magnitude_vector` [out].
        scale: alpha / rank, or alpha / sqrt(rank) for rslora.
        scale_of_experts: The scale of experts where it is another.
    """

    def __init__(
        self,
        base: Base,
        tensors: Mapping[str, _Array],
        scale: float,
        scale_of_experts: float | None = None,
    ) -> None:
        shapes = linear_shapes(base.config)
        inner = scale if scale_of_experts is None else scale_of_experts
        self.scale = scale
        self.number = next(_numbers)
        self.pairs: dict[_Place, _Pair] = {}
        self.gains: dict[_Place, _Gain] = {}
        for _, of_layer in itertools.groupby(fused_groups(base), lambda place: place[0]):
            halves: dict[_Place, tuple[_Array, _Array]] = {}  # of a layer: they are moved at once
            for place in of_layer:
                its = inner if place[1].startswith(_EXPERTS) else scale
                if (fused := _fuse(members(base, *place), tensors, shapes, its)) is not None:
                    halves[place] = fused
            moved = iter(upload([half for both in halves.values() for half in both], base.device))
            for place, a, b in zip(halves, moved, moved, strict=False):
                c = _magnified(base, place, tensors, a, b)
                if c is not None:
                    b = c[:, None] * b
                    bias = weight_at(base, *place)[1]
                    self.gains[place] = c, torch.zeros_like(c) if bias is None else (1 - c) * bias.float()
                self.pairs[place] = a.to(base.dtype), b.to(base.dtype)
        self._with_experts = layers_with_experts(self.pairs)
        # by layer and linear, [experts, …], 0 where an expert has nothing: what `pairs` has are views
        self.of_experts: dict[_Place, _Pair] = {}
        if base.config.experts is not None:
            count = base.config.experts.count
            for layer, linear in itertools.product(self._with_experts, ("gate_up", "down")):
                places = [(layer, f"experts.{expert}.{linear}") for expert in range(count)]
                pairs = {n: self.pairs[place] for n, place in enumerate(places) if place in self.pairs}
                if pairs:
                    a, b = self.of_experts[layer, linear] = _room((count,), pairs.values())
                for n, pair in pairs.items():
                    _put(a[n], b[n], pair)
                    rank = len(pair[0])
                    self.pairs[places[n]] = a[n, :rank], b[n, :, :rank]

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = self.pairs.get((layer, group))
        if pair is None:
            return y
        if (gain := self.gains.get((layer, group))) is not None:
            y.mul_(gain[0]).add_(gain[1])
        return y.addmm_(F.linear(x, pair[0]), pair[1].t())

    def reaches(self, layer: int, group: str) -> bool:
        return (layer, group) in self.pairs

    def has_experts(self, layer: int) -> bool:
        return layer in self._with_experts

    def routed(self, layer: int, tokens: torch.Tensor, ends: torch.Tensor) -> RoutedLora:
        return _RoutedFrozen(self, layer)

    def nbytes(self) -> int:
        """Return the bytes that the copy holds."""
        alone = (pair for place, pair in self.pairs.items() if not place[1].startswith(_EXPERTS))
        both = (*alone, *self.of_experts.values(), *self.gains.values())
        return sum(t.numel() * t.element_size() for pair in both for t in pair)


Signature = tuple[tuple[_Place, int, bool], ...]
"""The places at which any of some adapters has something, each with the largest rank there, and whether any
has a c of DoRA."""


def signature(base: Base, loras: Sequence[FrozenLora | None]) -> Signature:
    """Return what the shapes of a `MixedLora` depend on beside the number of its adapters."""
    parts = []
    for place in fused_groups(base):
        ranks = [lora.pairs[place][0].shape[0] for lora in loras if lora is not None and place in lora.pairs]
        if ranks:
            gains = any(lora is not None and place in lora.gains for lora in loras)
            parts.append((place, max(ranks), gains))
    return tuple(parts)


def number_of(lora: FrozenLora | None) -> int:
    """Return the number of an adapter, 0 for the bare base."""
    return 0 if lora is None else lora.number


class MixedLora:
    """Several frozen adapters (None: the bare base) in one batch, as two batched matmuls per group.

    Ranks and targets may differ: what is missing is zero. It holds copies, not the adapters. With `per`, the
    most tokens that each adapter has, and `tokens`, the most that a forward has, `fill` and `assign` write
    where a captured step reads; with 0 they have as many as come.
    """

    def __init__(self, base: Base, loras: Sequence[FrozenLora | None], per: int = 0, tokens: int = 0) -> None:
        self.count = len(loras)
        self.per = per
        self.device = base.device
        self.stacks: dict[_Place, _Pair] = {}
        # by layer and linear, [count, experts, …]: what `stacks` has of each expert are views of these
        self.of_experts: dict[_Place, _Pair] = {}
        self.gains: dict[_Place, _Gain] = {}  # [count, out]
        for (layer, group), rank, has_gain in signature(base, loras):
            pair = next(lora.pairs[layer, group] for lora in loras if lora and (layer, group) in lora.pairs)
            kind, _, linear = group.removeprefix("experts.").partition(".")
            if not group.startswith(_EXPERTS):
                a = pair[0].new_zeros(self.count, rank, pair[0].shape[1])
                self.stacks[layer, group] = a, pair[1].new_zeros(self.count, len(pair[1]), rank)
                if has_gain:
                    c = torch.ones(self.count, len(pair[1]), device=base.device)
                    self.gains[layer, group] = c, torch.zeros_like(c)
                continue
            if (layer, linear) not in self.of_experts:
                stacks = [
                    lora.of_experts[layer, linear]
                    for lora in loras
                    if lora and (layer, linear) in lora.of_experts
                ]
                room = self.count, len(stacks[0][0])
                self.of_experts[layer, linear] = _room(room, [(a[0], b[0]) for a, b in stacks])
            a, b = self.of_experts[layer, linear]
            self.stacks[layer, group] = a[:, int(kind)], b[:, int(kind)]
        self._with_experts = layers_with_experts(self.stacks)
        alone = {place: pair for place, pair in self.stacks.items() if not place[1].startswith(_EXPERTS)}
        self._written = alone | self.of_experts  # all there is, each once
        self.numbers = [0] * self.count
        self.fill(loras)
        self.gather: torch.Tensor | None = None
        self.place = torch.zeros(tokens, dtype=torch.int64, device=base.device)
        self._owner = torch.zeros_like(self.place)
        if per and self.count > 1:
            self.gather = torch.zeros(self.count * per, dtype=torch.int64, device=base.device)

    def fill(self, loras: Sequence[FrozenLora | None]) -> None:
        """Serve these instead, adapter by adapter; they must have the signature of the first ones."""
        for index, lora in enumerate(loras):
            if self.numbers[index] != number_of(lora):
                pairs = {} if lora is None else lora.pairs | lora.of_experts
                for place, (a, b) in self._written.items():
                    _put(a[index], b[index], pairs.get(place))
                for place, gain in self.gains.items():
                    its = None if lora is None else lora.gains.get(place)
                    for stack, plain, part in zip(gain, (1, 0), its or (None, None), strict=True):
                        stack[index] = plain if part is None else part
        self.numbers = [number_of(lora) for lora in loras]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copies."""
        return sum(part.nbytes for pair in (*self.stacks.values(), *self.gains.values()) for part in pair)

    def assign(self, owner: _Array) -> None:
        """Say which adapter each token of the next forwards uses, by its index, int64.

        When the forwards have more tokens, what is added to the rest of them is of no adapter in particular.
        """
        if self.count == 1:
            return
        rows, places = moves(owner, self.count, self.per)
        is_even = np.array_equal(rows, np.arange(len(owner)))  # and in order: nothing to move
        sources, place, owners = upload([rows, places, owner], self.device)
        gather = None if is_even else sources
        if not self.per:
            self.gather = gather
            self.place = place
            self._owner = owners
        else:
            assert self.gather is not None
            everybody = torch.arange(len(self.gather), device=self.device)
            self.gather.copy_(everybody if gather is None else gather)
            self.place[: len(owner)] = place
            self._owner[: len(owner)] = owners

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if (gain := self.gains.get((layer, group))) is not None:
            c, shift = gain  # [count, out], and below [tokens, out]: what each token's adapter has
            if self.count > 1 and self.gather is None:
                c, shift = (part.repeat_interleave(len(y) // self.count, 0) for part in gain)
            elif self.count > 1 and self.gather is not None:
                owner = self.place[: len(y)] // (len(self.gather) // self.count)
                c, shift = (part.index_select(0, owner) for part in gain)
            y.mul_(c).add_(shift)
        if (pair := self.stacks.get((layer, group))) is None:
            return y
        rows = x if self.gather is None else x.index_select(0, self.gather)
        low = torch.bmm(rows.view(self.count, -1, x.shape[-1]), pair[0].transpose(1, 2))
        if self.gather is None:
            y.view(self.count, -1, y.shape[-1]).baddbmm_(low, pair[1].transpose(1, 2))
            return y
        delta = torch.bmm(low, pair[1].transpose(1, 2)).view(-1, y.shape[-1])
        return y.add_(delta.index_select(0, self.place[: len(y)]))

    def reaches(self, layer: int, group: str) -> bool:
        return (layer, group) in self.stacks

    def has_experts(self, layer: int) -> bool:
        return layer in self._with_experts

    def routed(self, layer: int, tokens: torch.Tensor, ends: torch.Tensor) -> RoutedLora:
        return _RoutedMixed(self, layer, self._owner.index_select(0, tokens), ends)


@dataclass(frozen=True, slots=True)
class _RoutedFrozen:
    """One adapter on the rows of a layer's experts."""

    lora: FrozenLora
    layer: int

    def product(self, linear: str, x: torch.Tensor, weights: Weight, ends: torch.Tensor) -> torch.Tensor:
        y = grouped(x, weights, ends)
        stack = self.lora.of_experts.get((self.layer, linear))
        return y if stack is None else y.add_(_delta(stack, x, ends))


class _RoutedMixed:
    """Several adapters on the rows of a layer's experts, which are sorted by adapter and then by expert.

    `owner` is the adapter of each row, int64 [S].
    """

    def __init__(self, lora: MixedLora, layer: int, owner: torch.Tensor, ends: torch.Tensor) -> None:
        self._lora = lora
        self._layer = layer
        every = torch.arange(len(owner), dtype=ends.dtype, device=ends.device)
        pairs = owner * len(ends) + torch.searchsorted(ends, every, right=True)
        self._order = torch.argsort(pairs, stable=True)
        self._home = torch.empty_like(self._order)
        self._home[self._order] = every.long()
        self._ends = ends_of(pairs, lora.count * len(ends))

    def product(self, linear: str, x: torch.Tensor, weights: Weight, ends: torch.Tensor) -> torch.Tensor:
        y = grouped(x, weights, ends)
        stack = self._lora.of_experts.get((self._layer, linear))
        if stack is None:
            return y
        a, b = stack
        delta = _delta((a.flatten(0, 1), b.flatten(0, 1)), x.index_select(0, self._order), self._ends)
        return y.add_(delta.index_select(0, self._home))


def _delta(stack: _Pair, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return B A x of rows that are sorted by the pairs of a stack [pairs, …].

    `ends` says where the rows of each pair end, int32 [pairs].
    """
    a, b = stack
    return F.grouped_mm(F.grouped_mm(x, a.mT, offs=ends), b.mT, offs=ends)


def _room(counts: Sequence[int], pairs: Iterable[_Pair]) -> _Pair:
    """Return zeros for A [*counts, rank, in] and B [*counts, out, rank] of equal linears, at the largest rank
    of any, rounded up to what `F.grouped_mm` takes on a GPU. A lies as that product reads it fastest.
    """
    (a, b), *_ = pairs = list(pairs)
    rank = -(-max(len(a) for a, _ in pairs) // EVEN_RANK) * EVEN_RANK
    return a.new_zeros(*counts, a.shape[1], rank).mT, b.new_zeros(*counts, len(b), rank)


def moves(owner: _Array, count: int, per: int = 0) -> tuple[_Array, _Array]:
    """Return which row goes to each place of [count, per], and the place of each row. With 0 `per` is what
    the largest owner has.
    """
    sizes = np.bincount(owner, minlength=count)
    per = per or int(sizes.max())
    order = np.argsort(owner, kind="stable")
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.empty(len(owner), np.int64)
    place[order] = owner[order] * per + rank
    gather = np.zeros(count * per, np.int64)
    gather[place] = np.arange(len(owner))
    return gather, place


def _put(a: torch.Tensor, b: torch.Tensor, pair: _Pair | None) -> None:
    """Write a pair of at most this rank, or one for each expert, into A and B, and zeros where it has
    nothing.
    """
    a.zero_()
    b.zero_()
    if pair is not None:
        a[..., : pair[0].shape[-2], :] = pair[0]
        b[..., : pair[1].shape[-1]] = pair[1]


def _magnified(
    base: Base, place: _Place, tensors: Mapping[str, _Array], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor | None:
    """Return c of DoRA for a fused linear, 1 on rows that have none; None where no row has one."""
    modules = members(base, *place)
    if not any(f"{module}.{MAGNITUDE}" in tensors for module in modules):
        return None
    norms = row_norms(weight_at(base, *place)[0], b, a)
    c = torch.ones_like(norms)
    row = 0
    for module in modules:
        rows = slice(row, row + linear_shapes(base.config)[module][0])
        row = rows.stop
        if (magnitude := tensors.get(f"{module}.{MAGNITUDE}")) is not None:
            c[rows] = torch.from_numpy(np.array(magnitude)).to(c.device) / norms[rows]
    return c


def _fuse(
    modules: Sequence[str], tensors: Mapping[str, _Array], shapes: Mapping[str, tuple[int, int]], scale: float
) -> tuple[_Array, _Array] | None:
    """Return A and B of a fused linear, fp32 on the host; None where the adapter has nothing there."""
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
    return np.concatenate([a for a, _ in halves.values()]), b
