"""Adapters of random numbers, whose effect no engine can miss."""

from collections.abc import Iterable, Mapping

import numpy as np
from msgspec.structs import replace

from lorad.adapters.adapter import MAGNITUDE, Adapter, AdapterConfig

Shapes = Mapping[str, tuple[int, int]]


def random_adapter(
    shapes: Shapes,
    seed: int,
    rank: int = 4,
    std: float = 0.1,
    expert_rank: int | None = None,
    *,
    dora: bool = False,
) -> Adapter:
    """On every linear but lm_head."""
    rng = np.random.default_rng(seed)
    modules = tuple(sorted(module for module in shapes if module != "lm_head"))
    config, tensors = AdapterConfig(rank, 2.0 * rank, modules, expert_rank=expert_rank, dora=dora), {}
    for module in modules:
        out, into = shapes[module]
        tensors[f"{module}.lora_A.weight"] = rng.normal(0, std, (config.rank_of(module), into)).astype(
            np.float32
        )
        tensors[f"{module}.lora_B.weight"] = rng.normal(0, std, (out, config.rank_of(module))).astype(
            np.float32
        )
        if dora:
            tensors[f"{module}.{MAGNITUDE}"] = rng.uniform(0.5, 2, out).astype(np.float32)
    return Adapter(config, tensors)


def partial(adapter: Adapter, modules: Iterable[str], *, rslora: bool = False) -> Adapter:
    """Return the part of `adapter` that is on `modules`."""
    kept = tuple(sorted(modules))
    tensors = {
        name: tensor for name, tensor in adapter.tensors.items() if name.rsplit(".lora_", 1)[0] in kept
    }
    return Adapter(replace(adapter.config, modules=kept, rslora=rslora), tensors)
