"""The experts that servers compute on a CPU are those of the builtin engine, adapters and all."""

import numpy as np
import pytest
import torch

from lorad.engines.plain_experts import plain_experts
from lorad.models.base import Base
from lorad.models.directory import linear_shapes, resolve
from lorad.models.experts import mixture
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora, MixedLora
from tests.kit.fakes.random_adapters import random_adapter

LAYER, TOKENS = 1, 40


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(resolve("builtin:tiny-moe"), torch.float32, torch.device("cpu"))


def routed(x: torch.Tensor, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, weights) of each token's experts."""
    experts, config = base.layers[LAYER].experts, base.config.experts
    assert experts is not None and config is not None and config.is_normalized
    weights, index = (x @ experts.router.T).softmax(-1).topk(config.per_token)
    return index, weights / weights.sum(-1, keepdim=True)


def test_mixed_adapters_are_those_of_the_builtin_engine(base: Base) -> None:
    experts, config = base.layers[LAYER].experts, base.config.experts
    assert experts is not None and config is not None
    adapters = [random_adapter(linear_shapes(base.config), seed, rank) for seed, rank in ((1, 4), (2, 8))]
    loras = [FrozenLora(base, adapter.tensors, adapter.config.scale) for adapter in adapters]
    x = torch.randn(TOKENS, base.config.hidden_size, generator=torch.Generator().manual_seed(3))
    owner = np.arange(TOKENS) % 3
    mixed = MixedLora(base, [*loras, None])
    mixed.assign(owner)

    def added(group: str, slot: int, expert: int, rows: torch.Tensor) -> torch.Tensor:
        a, b = loras[slot].pairs[LAYER, f"experts.{expert}.{group}"]
        return rows @ a.T @ b.T

    slots = torch.from_numpy(np.where(owner == 2, -1, owner))
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    found = plain_experts(
        x,
        *routed(x, base),
        gate_up,
        down,
        slots,
        lambda *place: added("gate_up", *place),
        lambda *place: added("down", *place),
    )
    assert torch.allclose(found, mixture(x, experts, config, LAYER, mixed), atol=1e-4)
    assert not torch.allclose(found, mixture(x, experts, config), atol=1e-2)


def test_tokens_without_adapters_get_the_base(base: Base) -> None:
    experts, config = base.layers[LAYER].experts, base.config.experts
    assert experts is not None and config is not None
    x = torch.randn(TOKENS, base.config.hidden_size, generator=torch.Generator().manual_seed(4))

    def never(slot: int, expert: int, rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError((slot, expert, rows))

    slots = torch.full((TOKENS,), -1)
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    found = plain_experts(x, *routed(x, base), gate_up, down, slots, never, never)
    assert torch.allclose(found, mixture(x, experts, config), atol=1e-4)
