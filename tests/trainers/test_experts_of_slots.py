"""Slots that share a forward pass of a mixture: each has the numbers and gradients that it has alone."""

from collections.abc import Sequence

import pytest
import torch

from lorad.adapters.adapter import AdapterConfig
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.decoder import hidden
from lorad.models.directory import linear_shapes, resolve
from lorad.models.loading import load_base
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.slot import Slot

TIME = 24


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(resolve("builtin:tiny-moe"), torch.float32, torch.device("cpu"))


def filled(base: Base, rank: int, seed: int, *experts: str) -> Slot:
    """A slot whose B is not zero, on the attention and on all experts, or on those that are named."""
    names = [
        name
        for name in linear_shapes(base.config)
        if name.endswith("q_proj") or any(f".experts.{expert}." in name for expert in experts or "0123")
    ]
    slot = Slot(
        base, SlotSpec(AdapterConfig(rank=rank, alpha=2.0 * rank, modules=tuple(sorted(names))), seed=seed)
    )
    random = torch.Generator().manual_seed(seed)
    slot.weights.add_(0.1 * torch.randn(slot.weights.shape, generator=random).to(base.device))
    return slot


def states(base: Base, slots: Sequence[Slot], rows: Sequence[int]) -> torch.Tensor:
    """The last states of one row of tokens for each slot, whose gradients are taken as well."""
    ids = torch.randint(3, 60, (8, TIME), generator=torch.Generator().manual_seed(7))[list(rows)]
    ids, places = ids.to(base.device), torch.arange(TIME, device=base.device)
    ranges = [slice(n * TIME, (n + 1) * TIME) for n in range(len(slots))]
    found = hidden(base, ids, places, CausalAttention(), SlotLora(slots, ranges, train=True))
    found.float().square().sum().backward()
    return found.detach()


def test_slots_together_have_numbers_of_their_own(base: Base) -> None:
    slots = [filled(base, 3, 1), filled(base, 8, 2, "2", "1"), filled(base, 4, 3)]
    alone = [(states(base, [slot], [row])[0], slot.grads.clone()) for row, slot in enumerate(slots)]
    for slot in slots:
        slot.grads.zero_()
    together = states(base, slots, range(3))
    for (expected, gradient), found, slot in zip(alone, together, slots, strict=True):
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(slot.grads, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
