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
ADAPTERS = {
    "experts": ("*.experts.*", False),
    "all": ("all-linear", False),
    "gate-up": ("*.experts.*.gate_proj,*.experts.*.up_proj", False),
    "up": ("*.experts.*.up_proj", False),
    "one-expert": ("*.experts.1.*", False),
    "one-layer": ("*.layers.0.mlp.experts.*", False),
    "rslora": ("all-linear", True),
    "attention": ("q_proj,k_proj", False),
}


def adapter_of(name: str) -> Adapter:
    entry, rslora = ADAPTERS[name]
    return partial(random_adapter(SHAPES, len(name), 8), match_modules(SHAPES, entry), rslora=rslora)


def merged_logprobs(adapter: Adapter, directory: Path) -> np.ndarray:
    """Float32 [T] of `BATCH`: what transformers says of the merged model, which is made in `directory`."""
    shutil.copytree(MOE, directory)
    weights = load_file(directory / "model.safetensors")
    for module in adapter.config.modules:
        a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
        weights[f"{module}.weight"] += adapter.config.scale * b @ a
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    found: np.ndarray = reference_logprobs(reference_model(directory), BATCH).detach().numpy()
    return found
