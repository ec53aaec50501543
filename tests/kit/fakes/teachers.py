"""Another model with the tokenizer of `builtin:tiny`: one layer more, and what an adapter has learned."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lorad.adapters.adapter import Adapter
from lorad.models.directory import resolve

_SILENT = ("self_attn.o_proj", "mlp.down_proj")  # what a layer adds to the hidden state comes out of these


def make_teacher(directory: Path, adapter: Adapter | None = None, **config: Any) -> Path:
    """The function is that of `builtin:tiny` with the adapter: the layer more adds nothing.

    config: other values of config.json.
    """
    source = resolve("builtin:tiny")
    shutil.copytree(source, directory)
    told = json.loads((source / "config.json").read_text())
    layers = told["num_hidden_layers"]
    told |= {
        "num_hidden_layers": layers + 1,
        "layer_types": [*told["layer_types"], "full_attention"],
        **config,
    }
    (directory / "config.json").write_text(json.dumps(told))
    weights = load_file(source / "model.safetensors")
    if adapter is not None:
        for module in adapter.config.modules:
            a, b = (adapter.tensors[f"{module}.lora_{side}.weight"] for side in "AB")
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + adapter.config.scale * b @ a
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        is_silent = name.removeprefix("model.layers.0.").removesuffix(".weight") in _SILENT
        more = np.zeros_like(weights[name]) if is_silent else weights[name]
        weights[name.replace(".0.", f".{layers}.", 1)] = more
    save_file(weights, directory / "model.safetensors")
    return directory
