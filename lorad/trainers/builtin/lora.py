"""A slot's adapter inside the forward: y + scale * B(A(dropout(x))), with gradients into the slot.

Its arithmetic is in the base's dtype, as in `FrozenLora`, so that trainer and engine agree; weights, gradients and Adam
stay fp32: the casts are part of the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.trainers.builtin.slot import Site, Slot


class SlotLora:
    """See `LoraApply`. Without dropout the modules of a group share two matmuls; with it each draws its own mask."""

    def __init__(self, slot: Slot, train: bool) -> None:
        config = slot.spec.adapter
        self.sites, self.scale, self.rank = slot.sites, config.scale, config.rank
        self.dropout = config.dropout if train else 0.0
        self.generator = slot.dropout

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> Tensor:
        site = self.sites.get((layer, group))
        if site is None:
            return y
        return y + self._dropped(site, x) if self.dropout else self._fused(site, x, y)

    def _fused(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        b = site.b[0] if len(site.b) == 1 else torch.block_diag(*site.b)
        low = F.linear(x, site.a.to(x.dtype)).flatten(0, -2)
        return torch.addmm(y.flatten(0, -2), low, (b * self.scale).to(x.dtype).t()).view(y.shape)

    def _dropped(self, site: Site, x: Tensor) -> Tensor:
        """PEFT's order: dropout on x, module by module, before A."""
        halves = iter(site.a.to(x.dtype).split(self.rank))
        deltas = []
        for b in site.b:
            if b.shape[1] == 0:
                deltas.append(x.new_zeros(*x.shape[:-1], b.shape[0]))
                continue
            kept = torch.empty_like(x).bernoulli_(1 - self.dropout, generator=self.generator)
            low = F.linear(x * kept / (1 - self.dropout), next(halves))
            deltas.append(F.linear(low, (b * self.scale).to(x.dtype)))
        return torch.cat(deltas, -1)
