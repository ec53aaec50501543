"""What the forward must know of a model, from `config.json`; anything else is refused by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorad.errors import SpecError

SUPPORTED = ("Qwen3ForCausalLM",)

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Fused linear of a layer -> the Hugging Face modules in it, in the order of their output rows."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a base model, under Hugging Face's field names where they have one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    """The checkpoint's own dtype: float32, bfloat16 or float16."""

    @property
    def num_parameters(self) -> int:
        """How many numbers `load_base` keeps; tied embeddings count once."""
        hidden, heads, kv = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        attention = 2 * (heads + kv) * self.head_dim * hidden + 2 * self.head_dim
        bias = (heads + 2 * kv) * self.head_dim + hidden if self.attention_bias else 0
        layer = attention + bias + 3 * hidden * self.intermediate_size + 2 * hidden
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + hidden


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """`data` is a parsed `config.json`, `where` names it in errors.

    Raises: SpecError for an architecture or an option that the builtin forward does not compute.
    """
    architecture = next(iter(data.get("architectures") or ()), data.get("model_type", "none named"))
    if architecture not in SUPPORTED:
        raise SpecError(
            f"{where}: the builtin backend does not know the architecture {architecture}",
            hint=f"supported: {', '.join(SUPPORTED)}; other models need trainer.backend: megatron or fsdp",
        )
    _refuse_options(data, where)
    heads = _integer(data, "num_attention_heads", where)
    hidden = _integer(data, "hidden_size", where)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(data, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_integer(data, "intermediate_size", where),
        num_hidden_layers=_integer(data, "num_hidden_layers", where),
        num_attention_heads=heads,
        num_key_value_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or hidden // heads),
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=float(_rope(data).get("rope_theta") or data.get("rope_theta") or 10000.0),
        max_position_embeddings=_integer(data, "max_position_embeddings", where),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", False)),
        dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
    )


def _integer(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{where}: {key} is {value!r}, not a positive integer", hint="download the model again")
    return value


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return data.get("rope_parameters") or data.get("rope_scaling") or {}


def _refuse_options(data: Mapping[str, Any], where: str) -> None:
    rope = _rope(data)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        f"rope type {rope_type}": rope_type != "default",
        f"hidden_act {data.get('hidden_act')}": data.get("hidden_act", "silu") != "silu",
        "sliding-window attention": bool(data.get("use_sliding_window"))
        or "sliding_attention" in (data.get("layer_types") or ()),
        f"quantization {(data.get('quantization_config') or {}).get('quant_method')}": bool(
            data.get("quantization_config")
        ),
    }
    for option, found in refused.items():
        if found:
            raise SpecError(
                f"{where}: the builtin backend does not compute {option}",
                hint="use the unquantized, unscaled checkpoint, or another backend",
            )
