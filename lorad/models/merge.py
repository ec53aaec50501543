"""An adapter added into a copy of a small base, W + scale * B A: cheaper than two more products per linear.

For float32 on a CPU only: bfloat16 would round small adapters away, and a large base has little to gain.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lorad.models.base import Base
from lorad.models.config import GROUPS
from lorad.models.lora import FrozenLora, LoraApply

_MERGE_BYTES = 32 << 20  # the largest base of which copies are made
_KEPT = 4  # copies at once


class Merger:
    """What to run for one version alone.

    Copies are made when first needed; the same adapter gives the same bits.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self.is_worth_it = gains_by_merging(base)
        self.copies: OrderedDict[FrozenLora, Base] = OrderedDict()

    def alone(self, lora: FrozenLora | None) -> tuple[Base, LoraApply | None]:
        """Return the base to run and what to add to it."""
        if lora is None or not self.is_worth_it:
            return self.base, lora
        if lora not in self.copies:

            def add(layer: int, group: str, weight: torch.Tensor) -> torch.Tensor:
                pair = lora.pairs.get((layer, group))
                if pair is None:
                    return weight
                gain = lora.gains.get((layer, group))
                return torch.addmm(weight if gain is None else gain[0][:, None] * weight, pair[1], pair[0])

            with torch.no_grad():
                self.copies[lora] = with_weights(self.base, add)
            if len(self.copies) > _KEPT:
                self.copies.popitem(last=False)
        self.copies.move_to_end(lora)
        return self.copies[lora], None

    def forget(self, lora: FrozenLora | None) -> None:
        """Drop what is kept for a version that is unloaded."""
        if lora is not None:
            self.copies.pop(lora, None)


def gains_by_merging(base: Base) -> bool:
    """Return whether copies of a base are small and exact enough to merge adapters into them; copies of a
    packed base would be dense.
    """
    is_exact = base.device.type == "cpu" and base.dtype == torch.float32 and not base.is_packed
    return is_exact and base.nbytes() <= _MERGE_BYTES


def with_weights(base: Base, changed: Callable[[int, str, torch.Tensor], torch.Tensor]) -> Base:
    """Return a base with other linears; all else is shared.

    Args:
        changed: Gets the layer, the group as `LoraApply.apply` has it and the weight [out, in], which it may
            return and never writes to.
    """
    layers = []
    for index, layer in enumerate(base.layers):
        groups = [group for group in GROUPS if getattr(layer, group) is not None]
        merged: dict[str, Any] = {group: changed(index, group, getattr(layer, group)) for group in groups}
        if layer.experts is not None:
            inner: dict[str, torch.Tensor] = {}
            for group in ("gate_up", "down"):
                before = getattr(layer.experts, group)
                weights = [
                    changed(index, f"experts.{number}.{group}", weight)
                    for number, weight in enumerate(before)
                ]
                pairs = zip(weights, before, strict=True)
                is_same = all(new.data_ptr() == old.data_ptr() for new, old in pairs)
                inner[group] = before if is_same else torch.stack(weights)  # the same stay where they are
                if (shared := getattr(layer.experts, f"shared_{group}")) is not None:
                    inner[f"shared_{group}"] = changed(index, f"shared.{group}", shared)
            merged["experts"] = replace(layer.experts, **inner)
        layers.append(replace(layer, **merged))
    return replace(base, layers=tuple(layers), head=changed(len(layers), "lm_head", base.head))
