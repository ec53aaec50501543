"""Tensors from safetensors files into a `Base`. Nothing is ever unpickled."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorad.errors import SpecError
from lorad.models.base import Base, Layer, rope_tables
from lorad.models.config import GROUPS, ModelConfig
from lorad.models.directory import read_config, weight_files


def load_base(directory: Path, dtype: torch.dtype, device: torch.device) -> Base:
    """Reads, casts and fuses the weights of a Hugging Face directory.

    Raises: SpecError for an unknown architecture, a missing file or tensor, or a tensor of another shape.
    """
    config = read_config(directory)
    source = _Source(directory, dtype, device)
    embed = source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embed if config.tie_word_embeddings else source.take("lm_head.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(source, config, index) for index in range(config.num_hidden_layers))
    norm = source.take("model.norm.weight", config.hidden_size)
    cos, sin = rope_tables(config, dtype, device)
    return Base(config, dtype, device, embed, layers, norm, head, cos, sin)


class _Source:
    """Tensors by name over all shards of a directory, read one at a time."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.directory, self.dtype, self.device = directory, dtype, device
        self.files: dict[str, Path] = {}
        for path in weight_files(directory):
            try:
                with safe_open(path, framework="pt") as file:
                    self.files.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise SpecError(f"{path}: not a safetensors file: {error}", hint="download it again") from error

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.files:
            raise SpecError(f"{self.directory}: no tensor {name}", hint="complete the download")
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise SpecError(
                f"{self.files[name]}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}",
                hint="the weights and config.json belong to different models",
            )
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)  # never a view of the mapped file


def _layer(source: _Source, config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * dim, config.num_key_value_heads * dim

    def fused(group: str, kind: str, *rows: int) -> Tensor:
        columns = (hidden,) if kind == "weight" else ()
        parts = [
            source.take(f"{prefix}{module}.{kind}", out, *columns)
            for module, out in zip(GROUPS[group], rows, strict=True)
        ]
        return torch.cat(parts)

    biased = config.attention_bias
    q_norm = source.take(prefix + "self_attn.q_norm.weight", dim)
    k_norm = source.take(prefix + "self_attn.k_norm.weight", dim)
    return Layer(
        input_norm=source.take(prefix + "input_layernorm.weight", hidden),
        qkv=fused("qkv", "weight", query, key, key),
        qkv_bias=fused("qkv", "bias", query, key, key) if biased else None,
        qk_norm=torch.cat(
            [q_norm.expand(config.num_attention_heads, dim), k_norm.expand(config.num_key_value_heads, dim)]
        ),
        o=source.take(prefix + "self_attn.o_proj.weight", hidden, query),
        o_bias=source.take(prefix + "self_attn.o_proj.bias", hidden) if biased else None,
        post_norm=source.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=fused("gate_up", "weight", inner, inner),
        gate_up_bias=None,
        down_bias=None,
        down=source.take(prefix + "mlp.down_proj.weight", hidden, inner),
    )
