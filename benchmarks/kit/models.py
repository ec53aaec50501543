"""Models with random weights, in the sizes that the benchmarks need:
`python -m benchmarks.kit.models DIR NAME …`.

They are Qwen3 directories that lorad and transformers both load. They have no end-of-sequence token, so that
every sample is as long as it was asked for.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

STD = 0.02


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    positions: int = 8192

    @property
    def layer_parameters(self) -> int:
        """Count the parameters of the linears of all layers."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Count the parameters that a decode step multiplies with; the embedding is tied to the head."""
        return self.layer_parameters + self.head_parameters

    @property
    def label(self) -> str:
        millions = self.parameters / 1e6
        return f"{millions:.0f} M" if millions >= 1 else f"{millions:.1f} M"

    def lora_parameters(self, rank: int) -> int:
        """Count the parameters of a LoRA on all linears but the head."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (query + self.hidden) + 2 * (key + self.hidden)
        return self.layers * rank * (attention + 3 * (self.hidden + self.inner))


SHAPES = {
    "tiny": Shape(128, 3, 4, 2, 32, 384, 128),
    "25m": Shape(512, 8, 8, 4, 64, 1408, 16384),
    "100m": Shape(768, 12, 12, 4, 64, 2048, 32768),
}


def make(name: str, models: Path) -> Path:
    """The directory of a model, written unless it is there."""
    directory = models / name
    if not directory.exists():
        directory.mkdir(parents=True)
        shape = SHAPES[name]
        (directory / "config.json").write_text(json.dumps(_config(shape)))
        save_file(_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def _weights(shape: Shape) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears = {
        "self_attn.q_proj": (query, shape.hidden),
        "self_attn.k_proj": (key, shape.hidden),
        "self_attn.v_proj": (key, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }
    norms = {
        "input_layernorm": shape.hidden,
        "post_attention_layernorm": shape.hidden,
        "self_attn.q_norm": shape.head_dim,
        "self_attn.k_norm": shape.head_dim,
    }

    def random(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32) * np.float32(STD)

    weights = {"model.embed_tokens.weight": random(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": random(*size) for name, size in linears.items()}
        weights |= {f"{prefix}{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    return weights | {"model.norm.weight": np.ones(shape.hidden, np.float32)}


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        make(wanted, Path(sys.argv[1]))
