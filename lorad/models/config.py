"""What the forward must know of a model, from `config.json`; anything else is refused by name.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lorad.errors import SpecError
from lorad.models.rope_parameters import RopeParameters, parse_rope

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Fused linear of a layer -> the Hugging Face modules in it, in the order of their output rows."""
_OF_EXPERT = ("gate_up", "down")


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers' code fixes for an architecture.

    A bias is there always, never, or if that field says so.
    """

    model_type: str
    qk_norm: bool
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Values of fields that `config.json` leaves out."""
    has_experts: bool = False


_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", False, True, False, False, {"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": _Family(
        "qwen3", True, "attention_bias", "attention_bias", False, {"num_key_value_heads": 32, "head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": _Family(
        "qwen3_moe",
        True,
        "attention_bias",
        "attention_bias",
        False,
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
        },
        has_experts=True,
    ),
    "LlamaForCausalLM": _Family("llama", False, "attention_bias", "attention_bias", "mlp_bias"),
}
_SUPPORTED = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts that every layer has in place of an MLP.

    width: the intermediate size of each.
    is_normalized: the weights of a token's experts add up to one.
    """

    count: int
    per_token: int
    width: int
    is_normalized: bool


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
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    """The checkpoint's own dtype: float32, bfloat16 or float16."""
    experts: ExpertsConfig | None = None

    @property
    def num_parameters(self) -> int:
        """Count the numbers in the checkpoint; tied embeddings count once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        weights = 2 * (query + key) * hidden + 3 * hidden * inner * (self.experts is None)
        if self.experts is not None:
            weights += self.experts.count * self._of_expert + self.experts.count * hidden
        norms = 2 * hidden + self.qk_norm * 2 * self.head_dim
        biases = (
            self.qkv_bias * (query + 2 * key) + self.o_bias * hidden + self.mlp_bias * (2 * inner + hidden)
        )
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * (weights + norms + biases) + embeddings + hidden

    @property
    def num_active_parameters(self) -> int:
        """Count the numbers that a token meets: all, without the experts that it is not sent to."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.count - self.experts.per_token
        return self.num_parameters - self.num_hidden_layers * idle * self._of_expert

    @property
    def _of_expert(self) -> int:
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.width


def groups_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the fused linears that each layer has; an expert's are `experts.0.gate_up` and the like."""
    if config.experts is None:
        return tuple(GROUPS)
    inner = [f"experts.{expert}.{group}" for expert in range(config.experts.count) for group in _OF_EXPERT]
    return ("qkv", "o", *inner)


def modules_in(group: str) -> tuple[str, ...]:
    """Return the Hugging Face modules in a fused linear of a layer, in the order of their output rows."""
    expert, _, inner = group.rpartition(".")
    return (
        tuple(name.replace("mlp.", f"mlp.{expert}.") for name in GROUPS[inner]) if expert else GROUPS[group]
    )


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """`data` is a parsed `config.json`, `where` names it in errors.

    Raises: SpecError for an architecture or an option that the builtin forward does not compute.
    """
    architecture = _architecture(data, where)
    family = _FAMILIES[architecture]
    data = {**family.defaults, **data}
    layers, positions = (
        _integer(data, key, where) for key in ("num_hidden_layers", "max_position_embeddings")
    )
    _refuse_options(data, layers, where)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(data, "vocab_size", where),
        intermediate_size=_integer(data, "intermediate_size", where),
        num_hidden_layers=layers,
        **_heads(data, where),
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(data, positions, where),
        max_position_embeddings=positions,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=_switch(family.qkv_bias, data),
        o_bias=_switch(family.o_bias, data),
        mlp_bias=_switch(family.mlp_bias, data),
        dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
        experts=_experts(data, where) if family.has_experts else None,
    )


def _experts(data: Mapping[str, Any], where: str) -> ExpertsConfig:
    data = {"num_experts": data.get("num_local_experts", 128), **data}  # transformers 5 writes the former
    count, per_token, width = (
        _integer(data, key, where) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    if per_token > count:
        raise SpecError(
            f"{where}: num_experts_per_tok is {per_token}, of {count} experts",
            hint="download the model again",
        )
    return ExpertsConfig(count, per_token, width, bool(data.get("norm_topk_prob", False)))


def _architecture(data: Mapping[str, Any], where: str) -> str:
    model_type = data.get("model_type")
    by_type = {family.model_type: name for name, family in _FAMILIES.items()}
    name = next(iter(data.get("architectures") or ()), None) or by_type.get(
        str(model_type), model_type or "none named"
    )
    other_type = name in _FAMILIES and model_type not in (None, _FAMILIES[name].model_type)
    if name not in _FAMILIES or other_type:
        raise SpecError(
            f"{where}: the builtin backend does not know the architecture {name}"
            + (f" of model_type {model_type}" if other_type else ""),
            hint=f"supported: {', '.join(_SUPPORTED)}; other models need trainer.backend: megatron or fsdp",
        )
    return str(name)


def _heads(data: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the sizes of attention, which must fit each other."""
    hidden, heads = (_integer(data, key, where) for key in ("hidden_size", "num_attention_heads"))
    found = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    for key in found:
        if data.get(key) is not None:
            found[key] = _integer(data, key, where)
    if heads % found["num_key_value_heads"] or found["head_dim"] % 2:
        raise SpecError(
            f"{where}: {heads} heads over {found['num_key_value_heads']} kv heads of head_dim "
            f"{found['head_dim']}",
            hint="heads must be a multiple of num_key_value_heads, and head_dim even; download the model "
            "again",
        )
    return {"hidden_size": hidden, "num_attention_heads": heads, **found}


def _integer(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(
            f"{where}: {key} is {value!r}, not a positive integer", hint="download the model again"
        )
    return value


def _switch(rule: bool | str, data: Mapping[str, Any]) -> bool:
    return rule if isinstance(rule, bool) else bool(data.get(rule, False))


def _refuse_options(data: Mapping[str, Any], layers: int, where: str) -> None:
    quantization = data.get("quantization_config")
    refused = {
        f"hidden_act {data.get('hidden_act')}": data.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding-window attention": _slides(data, layers),
        "layers without experts among those that have them": data.get("decoder_sparse_step", 1) != 1
        or bool(data.get("mlp_only_layers")),
        f"quantization {(quantization or {}).get('quant_method')}": bool(quantization),
    }
    for option, found in refused.items():
        if found:
            raise SpecError(
                f"{where}: the builtin backend does not compute {option}",
                hint="use an unquantized checkpoint with full attention and silu of "
                f"{', '.join(_SUPPORTED)}, or another backend",
            )


def _slides(data: Mapping[str, Any], layers: int) -> bool:
    """Return whether any layer is not full attention: `layer_types` decides, else those from
    max_window_layers on slide.
    """
    if data.get("layer_types"):
        return any(kind != "full_attention" for kind in data["layer_types"])
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    return window is not None and data.get("max_window_layers", 28) < layers
