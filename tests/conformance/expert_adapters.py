"""Adapters on parts of a small mixture, and what transformers says of each: the base with it added in."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lorad.adapters.adapter import Adapter
from lorad.adapters.targets import match_modules
from lorad.models.directory import linear_shapes, read_config, resolve
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.kit.fakes.random_adapters import partial, random_adapter

MOE = resolve("builtin:tiny-moe")
SHAPES = linear_shapes(read_config(MOE))
BATCH = random_batch(1)
ADAPTERS: dict[str, tuple[str, bool, int]] = {
    "experts": ("*.experts.*", False, 8),
    "all": ("all-linear", False, 8),
    "gate-up": ("*.experts.*.gate_proj,*.experts.*.up_proj", False, 8),
    "up": ("*.experts.*.up_proj", False, 8),
    "one-expert": ("*.experts.1.*", False, 8),
    "one-layer": ("*.layers.0.mlp.experts.*", False, 8),
    "rslora": ("all-linear", True, 8),
    "attention": ("q_proj,k_proj", False, 8),
    "low-rank-experts": ("all-linear", False, 3),
    "high-rank-experts": ("all-linear", False, 16),
    "low-rank-rslora": ("all-linear", True, 2),
    "low-rank-up": ("v_proj,*.experts.2.up_proj", False, 4),
}
"""What is adapted, whether with rslora, and the rank of experts, beside 8 elsewhere."""


def adapter_of(name: str) -> Adapter:
    entry, rslora, rank = ADAPTERS[name]
    return partial(
        random_adapter(SHAPES, len(name), 8, expert_rank=rank), match_modules(SHAPES, entry), rslora=rslora
    )


def merged_logprobs(adapter: Adapter, directory: Path) -> np.ndarray:
    """Float32 [T] of `BATCH`: what transformers says of the merged model, which is made in `directory`."""
    shutil.copytree(MOE, directory)
    weights = load_file(directory / "model.safetensors")
    for module in adapter.config.modules:
        a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
        weights[f"{module}.weight"] += adapter.config.scale_of(module) * b @ a
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    found: np.ndarray = reference_logprobs(reference_model(directory), BATCH).detach().numpy()
    return found
