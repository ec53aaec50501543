"""Adapters inside the forward: y + scale * B(A(dropout(x))), with gradients straight into the slots.

With DoRA it is c * (W x + scale * B(A x)) plus the bias, where c = m / |W + scale * B A| and, as its paper
and PEFT have it, the norm counts as a constant in the gradient.

Arithmetic is in the base's dtype, as in `FrozenLora`, so that trainer and engine agree; weights, gradients
and Adam stay fp32. Rows of several slots may share one forward: each slot has a range of them. One slot on a
small base is merged, W + scale * B A, as the engine has it: its two products for y and one for x's gradient
are then part of the base's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.models.base import Base, Weight
from lorad.models.lora import EVEN_RANK
from lorad.models.merge import gains_by_merging, with_weights
from lorad.models.ops import apply
from lorad.models.products.forms import grouped, grouped_plainly
from lorad.trainers.builtin.slot import Half, Site, Slot


class SlotLora:
    """The adapters of some slots in one forward, see `LoraApply`.

    Attributes:
        ranges: The rows of each slot, in order; all of them when there is one slot.
        train: Whether dropout acts, each module of a fused linear with a mask of its own.
        amplify: See `Policy`.
        is_merged: Whether the base has what is added already, and only gradients are left to take.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        ranges: Sequence[slice],
        train: bool,
        amplify: float = 1.0,
        is_merged: bool = False,
    ) -> None:
        self.slots = slots
        self.ranges = ranges
        self.train = train
        self.amplify = amplify
        self.is_merged = is_merged
        self.anchor = slots[0].anchor
        self.generators = [slot.dropout for slot in slots if train and slot.spec.adapter.dropout]

    @property
    def first_layer(self) -> int:
        """Return the first layer at which any of the slots has something; what is before it needs no
        backward.
        """
        return min(layer for slot in self.slots for layer, _ in slot.sites)

    def at(self, ranges: Sequence[slice]) -> SlotLora:
        """Return the same slots on other rows."""
        return SlotLora(self.slots, ranges, self.train, self.amplify, self.is_merged)

    def merged(self, base: Base) -> tuple[Base, SlotLora]:
        """Return what to run: the base and this, or where it is cheaper a base with the slot merged."""
        slot, *others = self.slots
        rows = self.ranges[-1].stop
        enough = rows >= 2 * base.config.hidden_size  # else the copies take longer than the products
        keeps = slot.spec.adapter.dora and torch.is_grad_enabled()  # W x alone is in the gradient of m
        if others or self.generators or keeps or not (enough and gains_by_merging(base)):
            return base, self

        def add(layer: int, group: str, weight: Tensor) -> Tensor:
            site = slot.sites.get((layer, group))
            if site is None:
                return weight
            weight = weight.clone()
            scale = self.amplify * site.scale
            for half in site.halves:
                weight[half.rows].addmm_(half.b, site.a[half.ranks], alpha=scale)
                if half.magnitude is not None:
                    weight[half.rows] *= (half.magnitude / site.norms(half, scale))[:, None]
            return weight

        merged = SlotLora(self.slots, self.ranges, self.train, self.amplify, is_merged=True)
        return with_weights(base, add), merged

    def reaches(self, layer: int, group: str) -> bool:
        return any((layer, group) in slot.sites for slot in self.slots)

    def has_experts(self, layer: int) -> bool:
        return any(layer in slot.with_experts for slot in self.slots)

    def routed(self, layer: int, tokens: Tensor, ends: Tensor) -> _RoutedSlots:
        """Return what the experts of a layer get, see `LoraApply`."""
        if len(self.slots) == 1:
            return _RoutedSlots(self, layer, [(self.slots[0], slice(None), ends)])
        where: list[tuple[Slot, slice | Tensor, Tensor]] = []
        for slot, span in zip(self.slots, self.ranges, strict=True):
            rows = ((tokens >= span.start) & (tokens < span.stop)).nonzero().squeeze(1)
            where.append((slot, rows, torch.searchsorted(rows, ends.long()).to(ends.dtype)))
        return _RoutedSlots(self, layer, where)

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> Tensor:
        each = zip(self.slots, self.ranges, strict=True)
        return self.add(x, y, self.parts((slot, (layer, group), rows) for slot, rows in each))

    def add(self, x: Tensor, y: Tensor, parts: list[_SlotDelta]) -> Tensor:
        """Return y with what the slots add to their rows."""
        if not parts or (self.is_merged and not torch.is_grad_enabled()):
            return y
        if self.is_merged:
            return apply(_TakeGradients, x.detach(), y, self.anchor, parts)  # type: ignore[no-any-return]
        return apply(_AddLora, x, y, self.anchor, parts)  # type: ignore[no-any-return]

    def parts(self, where: Iterable[tuple[Slot, tuple[int, str], slice]]) -> list[_SlotDelta]:
        """Return what each slot has at a place (layer, group) for some rows."""
        deltas = []
        for slot, place, rows in where:
            site = slot.sites.get(place)
            if site is not None and rows.stop > rows.start:
                dropout = slot.spec.adapter.dropout if self.train else 0.0
                deltas.append(_SlotDelta(site, rows, self.amplify * site.scale, dropout, slot.dropout))
        return deltas


@dataclass(frozen=True, slots=True)
class _RoutedSlots:
    """The slots on the rows of a layer's experts. `where` has for each slot its rows, sorted by expert, and
    where among them the rows of each expert end, int32 [experts].
    """

    lora: SlotLora
    layer: int
    where: Sequence[tuple[Slot, slice | Tensor, Tensor]]

    def product(self, linear: str, x: Tensor, weights: Weight, ends: Tensor) -> Tensor:
        lora = self.lora
        parts = list[_SlotDelta]()
        for slot, rows, its_ends in self.where:
            dropout = slot.spec.adapter.dropout if lora.train else 0.0
            for experts, site in slot.of_experts.get((self.layer, linear), ()):
                mine = rows
                ends_of_mine = its_ends
                if len(experts) != len(its_ends):
                    places = [0, *its_ends.tolist()]
                    part = slice(places[experts.start], places[experts.stop])
                    mine = part if isinstance(rows, slice) else rows[part]
                    ends_of_mine = its_ends[experts.start : experts.stop] - part.start
                scale = lora.amplify * site.scale
                parts.append(_ExpertsPart(site, mine, scale, dropout, slot.dropout, ends_of_mine))
        if not parts or lora.is_merged:
            return lora.add(x, grouped(x, weights, ends), parts)
        return apply(_Routed, x, lora.anchor, weights, ends, parts)  # type: ignore[no-any-return]


@dataclass(slots=True)
class _SlotDelta:
    """One slot's delta on its rows of one fused linear."""

    site: Site
    rows: slice | Tensor
    scale: float
    dropout: float
    generator: torch.Generator

    def low(self, x: Tensor) -> Tensor:
        """Return A x of all modules without dropout."""
        return F.linear(x[self.rows], self.site.a.to(x.dtype))

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Add the delta to y; return A x, [rows, modules * rank], and the masks of dropout."""
        x = x[self.rows]
        y = y[self.rows]
        a = self.site.a.to(x.dtype)
        masks = []
        if self.is_dora and self.site.bias is not None:
            for half in self.site.halves:
                y[:, half.rows].sub_(self.site.bias[half.rows])
        if self.dropout:
            masks = [self._mask(x) for _ in self.site.halves]
            each = zip(self.site.halves, masks, strict=True)
            low = torch.cat([self._dropped(x, m) @ a[h.ranks].t() for h, m in each], 1)
        else:
            low = F.linear(x, a)
        for half in self.site.halves:
            b, scale = self._scaled(half, x.dtype)
            y[:, half.rows].addmm_(low[:, half.ranks], b.t(), alpha=scale)
        return low, masks

    @property
    def is_dora(self) -> bool:
        return self.site.halves[0].magnitude is not None

    def lengthen(self, y: Tensor) -> list[Tensor]:
        """Turn W x + scale * B A x in y into what DoRA gives. Return c of each module, and y before."""
        kept: list[Tensor] = []
        y = y[self.rows]
        for half in self.site.halves:
            assert half.magnitude is not None
            c = half.magnitude / self.site.norms(half, self.scale)
            out = y[:, half.rows]
            kept += [c, out.clone()]
            out.mul_(c)
            if self.site.bias is not None:
                out.add_(self.site.bias[half.rows])
        return kept

    def shorten(self, kept: Sequence[Tensor], y_grad: Tensor) -> None:
        """Take the gradient of m, and turn y's, in place, into the gradient of what `lengthen` got."""
        y_grad = y_grad[self.rows]
        for half, c, before in zip(self.site.halves, kept[::2], kept[1::2], strict=True):
            assert half.magnitude is not None and half.magnitude_grad is not None
            out = y_grad[:, half.rows]
            norms = self.site.norms(half, self.scale)
            half.magnitude_grad.add_((out.float() * before.float()).sum(0) / norms)
            out.mul_(c)

    def backward(
        self, x: Tensor, low: Tensor, masks: list[Tensor], y_grad: Tensor, x_grad: Tensor | None
    ) -> None:
        """Add to the slot's gradients and to this part's rows of x_grad, if there is one."""
        x = x[self.rows]
        y_grad = y_grad[self.rows]
        low_grad = torch.empty_like(low)
        for half in self.site.halves:
            b, scale = self._scaled(half, x.dtype)
            b = b.t().contiguous().t()  # twice as quick where the rank is low
            out = low_grad[:, half.ranks]
            torch.addmm(out, y_grad[:, half.rows], b, beta=0, alpha=scale, out=out)
            half.b_grad.add_((low[:, half.ranks].t() @ y_grad[:, half.rows]).t(), alpha=self.scale)
        into = None if x_grad is None else x_grad[self.rows]
        if masks:
            a = self.site.a.to(x.dtype)
            for half, mask in zip(self.site.halves, masks, strict=True):
                _accumulate(self.site.a_grad[half.ranks], low_grad[:, half.ranks], self._dropped(x, mask))
                if into is not None:
                    into.add_(self._dropped(low_grad[:, half.ranks] @ a[half.ranks], mask))
            return
        _accumulate(self.site.a_grad, low_grad, x)
        if into is not None:
            into.addmm_(low_grad, self.site.a.to(x.dtype))

    def _mask(self, x: Tensor) -> Tensor:
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        return kept.bernoulli_(1 - self.dropout, generator=self.generator)

    def _dropped(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).mul_(1 / (1 - self.dropout))

    def _scaled(self, half: Half, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Return B, and what its product is still to be multiplied by; in a narrow dtype B has the scale, as
        in the engine.
        """
        if half.b.dtype == dtype:
            return half.b, self.scale
        return (half.b * self.scale).to(dtype), 1.0


@dataclass(slots=True)
class _ExpertsPart(_SlotDelta):
    """One slot's delta on its rows of one linear of some experts, without DoRA: products for all of them.
    The rows of each expert end at `ends`, int32 [experts].
    """

    ends: Tensor

    def low(self, x: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        """Return A x of each module, [rows, modules * rank rounded up]."""
        x = x[self.rows]
        pairs = [self._pair(half, x.dtype) for half in self.site.halves]
        seen = [self._dropped(x, mask) for mask in masks] or [x] * len(pairs)
        return torch.cat([self._product(x, a.mT) for x, (a, _, _) in zip(seen, pairs, strict=True)], 1)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        masks = [self._mask(x[self.rows]) for _ in self.site.halves] if self.dropout else []
        low = self.low(x, masks)
        for half, module_low in zip(self.site.halves, low.chunk(len(self.site.halves), 1), strict=True):
            _, b, scale = self._pair(half, x.dtype)
            self._put(y[:, half.rows], self._product(module_low, b.mT), scale)
        return low, masks

    def backward(
        self, x: Tensor, low: Tensor, masks: list[Tensor], y_grad: Tensor, x_grad: Tensor | None
    ) -> None:
        x = x[self.rows]
        y_grad = y_grad[self.rows]
        for number, half in enumerate(self.site.halves):
            a, b, scale = self._pair(half, x.dtype)
            rank = half.b.shape[-1]
            module_low = low.chunk(len(self.site.halves), 1)[number]
            out = y_grad[:, half.rows]
            half.b_grad.add_(self._product(out.t(), module_low)[..., :rank], alpha=self.scale)
            low_grad = self._product(out, b).mul_(scale)
            seen = self._dropped(x, masks[number]) if masks else x
            self.site.a_grad[:, half.ranks].add_(self._product(low_grad.t(), seen)[:, :rank])
            if x_grad is not None:
                back = self._product(low_grad, a)
                self._put(x_grad, self._dropped(back, masks[number]) if masks else back, 1.0)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply expert by expert: [rows, n] times [experts, n, m] is [rows, m], and [n, rows] times [rows,
        m], summed over the rows of each expert, is [experts, n, m].
        """
        return F.grouped_mm(left, right, offs=self.ends)

    def _pair(self, half: Half, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """Return A and B of all experts as the products take them, of the rank rounded up; see `_scaled`."""
        b, scale = self._scaled(half, dtype)
        more = -b.shape[-1] % EVEN_RANK
        a = self.site.a[:, half.ranks].to(dtype)
        return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more)), scale) if more else (a, b, scale)

    def _put(self, target: Tensor, new: Tensor, scale: float) -> None:
        """Add to this part's rows."""
        if isinstance(self.rows, slice):
            target[self.rows].add_(new, alpha=scale)
        else:
            target.index_add_(0, self.rows, new, alpha=scale)


def _accumulate(grad: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right to `grad`; the product has the dtype of its factors, the sum is fp32."""
    if left.dtype == grad.dtype:
        grad.addmm_(left.t(), right)
    else:
        grad.add_(left.t() @ right)


class _AddLora(Function):
    """Writes the deltas into y. The anchor makes autograd record it where neither x nor y has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, anchor: Tensor, parts: list[_SlotDelta]) -> Tensor:
        ctx.mark_dirty(y)
        ctx.parts = parts
        tensors = [x]
        for part in parts:
            low, masks = part.add(x, y)
            tensors += [low, *masks, *(part.lengthen(y) if part.is_dora else ())]
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, *rest = ctx.saved_tensors
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = torch.zeros_like(x)
        saved = iter(rest)
        if any(part.is_dora for part in ctx.parts):
            y_grad = y_grad.clone()
        for part in ctx.parts:
            low = next(saved)
            masks = [next(saved) for _ in part.site.halves] if part.dropout else []
            if part.is_dora:
                part.shorten([next(saved) for _ in range(2 * len(part.site.halves))], y_grad)
            part.backward(x, low, masks, y_grad, x_grad)
        return x_grad, y_grad, None, None


class _Routed(Function):
    """The product of rows sorted by expert with its frozen weights, and the deltas; none of DoRA."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weights: Weight, ends: Tensor, parts: list[_SlotDelta]
    ) -> Tensor:
        y = grouped_plainly(x, weights, ends)
        ctx.weights = weights
        ctx.parts = parts
        tensors = [x, ends]
        for part in parts:
            low, masks = part.add(x, y)
            tensors += [low, *masks]
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, ends, *rest = ctx.saved_tensors
        x_grad = None
        saved = iter(rest)
        y_grad = y_grad.contiguous()
        if ctx.needs_input_grad[0]:
            x_grad = grouped_plainly(y_grad, ctx.weights, ends, is_backward=True)
        for part in ctx.parts:
            low = next(saved)
            masks = [next(saved) for _ in part.site.halves] if part.dropout else []
            part.backward(x, low, masks, y_grad, x_grad)
        return x_grad, None, None, None, None


class _TakeGradients(Function):
    """Pass y on as it is; the backward takes the gradients of A and B, and x gets its own from the merged
    product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, anchor: Tensor, parts: list[_SlotDelta]) -> Tensor:
        ctx.mark_dirty(y)
        ctx.parts = parts
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor) -> tuple[None, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        for part in ctx.parts:
            part.backward(x, part.low(x), [], y_grad, None)
        return None, y_grad, None, None
