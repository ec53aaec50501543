"""What the forward must know of a model, from `config.json`; anything else is refused by name.

Imports no torch.
"""

import math
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
_MLP = ("gate_up", "down")
_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _Mixture:
    """What transformers' code fixes for a family's mixtures of experts.

    count: of experts, where `config.json` leaves it out. width, shared_width: the fields whose product is an
    intermediate size. is_normalized: as biases of `_Family`. For the rest see `ExpertsConfig`.
    """

    count: int
    width: str = "moe_intermediate_size"
    is_normalized: bool | str = "norm_topk_prob"
    shared: str = ""
    shared_width: tuple[str, ...] = ()
    has_shared_gate: bool = False
    is_sigmoid: bool = False
    is_weighted_in_fp32: bool = False
    block: str = "mlp"
    linears: tuple[str, str, str] = _LINEARS


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers' code fixes for an architecture.

    A bias or a norm is there always, never, or if that field says so.
    """

    model_type: str
    qk_norm: bool | str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that `config.json` leaves out."""
    mixture: _Mixture | None = None
    norms_all_heads: bool = False
    rotates_partly: bool = False


_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", False, True, False, False, {"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": _Family(
        "qwen3", True, "attention_bias", "attention_bias", False, {"num_key_value_heads": 32, "head_dim": 128}
    ),
    "LlamaForCausalLM": _Family("llama", False, "attention_bias", "attention_bias", "mlp_bias"),
    "Qwen2MoeForCausalLM": _Family(
        "qwen2_moe",
        False,
        "qkv_bias",
        False,
        False,
        {
            "qkv_bias": True,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
        },
        _Mixture(
            60,
            shared="mlp.shared_expert",
            shared_width=("shared_expert_intermediate_size",),
            has_shared_gate=True,
        ),
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
        },
        _Mixture(128),
    ),
    "OlmoeForCausalLM": _Family(
        "olmoe",
        True,
        "attention_bias",
        "attention_bias",
        False,
        {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        _Mixture(64, "intermediate_size"),
        norms_all_heads=True,
    ),
    "MixtralForCausalLM": _Family(
        "mixtral",
        False,
        False,
        False,
        False,
        {
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "use_sliding_window": True,  # wherever sliding_window is a number
            "sliding_window": None,
        },
        _Mixture(
            8,
            "intermediate_size",
            True,
            is_weighted_in_fp32=True,
            block="block_sparse_moe",
            linears=("w1", "w3", "w2"),
        ),
    ),
    "Glm4MoeForCausalLM": _Family(
        "glm4_moe",
        "use_qk_norm",
        "attention_bias",
        False,
        False,
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        _Mixture(
            128,
            shared="mlp.shared_experts",
            shared_width=("moe_intermediate_size", "n_shared_experts"),
            is_sigmoid=True,
            is_weighted_in_fp32=True,
        ),
        rotates_partly=True,
    ),
}
_SUPPORTED = tuple(_FAMILIES)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # transformers 5 writes the second


@dataclass(frozen=True, slots=True)
class _Shared:
    """The MLP that all tokens of a layer with experts go through.

    name: of its module in a layer. is_gated: its output is multiplied by a sigmoid of its input.
    """

    name: str
    width: int
    is_gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts that layers have in place of an MLP.

    width: the intermediate size of each.
    is_normalized: the weights of a token's experts add up to one.
    dense_layers: those that have an MLP all the same.
    is_sigmoid: how scores come from logits; by softmax else. They are compared with a bias of each expert
        added, and only within the `groups_per_token` best of `groups` groups of experts.
    scale: weights are multiplied by it.
    is_weighted_in_fp32: whatever the dtype of all else.
    block, linears: the names in checkpoints of the module in a layer, and of an expert's gate, up and down.
    """

    count: int
    per_token: int
    width: int
    is_normalized: bool
    dense_layers: frozenset[int] = frozenset()
    shared: _Shared | None = None
    is_sigmoid: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    is_weighted_in_fp32: bool = False
    block: str = "mlp"
    linears: tuple[str, str, str] = _LINEARS


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
    norms_all_heads: bool = False
    """The norms of q and k are each over all heads together."""
    unused_layers: int = 0
    """How many layers of the checkpoint follow the last; they predict later tokens."""

    @property
    def num_parameters(self) -> int:
        """Count the numbers of the checkpoint that are computed with; tied embeddings count once."""
        hidden, experts = self.hidden_size, self.experts
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norms = 2 * hidden + self.qk_norm * (query + key if self.norms_all_heads else 2 * self.head_dim)
        biases = self.qkv_bias * (query + 2 * key) + self.o_bias * hidden
        each = 2 * (query + key) * hidden + norms + biases
        inner, mixture = self.intermediate_size, 0
        dense = 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)
        if experts is not None:
            mixture = experts.count * (self._of_expert + hidden + experts.is_sigmoid)
            if experts.shared is not None:
                mixture += hidden * (3 * experts.shared.width + experts.shared.is_gated)
        layers = self.num_hidden_layers * (each + dense) + self._mixtures * (mixture - dense)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return layers + embeddings + hidden

    @property
    def num_active_parameters(self) -> int:
        """Count the numbers that a token meets: all, without the experts that it is not sent to."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.count - self.experts.per_token
        return self.num_parameters - self._mixtures * idle * self._of_expert

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def _mixtures(self) -> int:
        return sum(map(self.has_experts, range(self.num_hidden_layers)))

    @property
    def _of_expert(self) -> int:
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.width


def groups_of(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Return the fused linears that a layer has; an expert's are `experts.0.gate_up` and the like, those of
    the MLP beside the experts `shared.gate_up` and `shared.down`.
    """
    if config.experts is None or not config.has_experts(layer):
        return tuple(GROUPS)
    inner = [f"experts.{expert}.{group}" for expert in range(config.experts.count) for group in _MLP]
    return ("qkv", "o", *inner, *(f"shared.{group}" for group in _MLP if config.experts.shared))


def modules_in(config: ModelConfig, group: str) -> tuple[str, ...]:
    """Return the Hugging Face modules in a fused linear of a layer, in the order of their output rows."""
    kind, _, linear = group.rpartition(".")
    if not kind:
        return GROUPS[group]
    assert config.experts is not None
    path, names = f"{config.experts.block}.{kind}", config.experts.linears
    if kind == "shared":
        assert config.experts.shared is not None
        path, names = config.experts.shared.name, _LINEARS
    return tuple(f"{path}.{name}" for name in (names[:2] if linear == "gate_up" else names[2:]))


def shapes_in(config: ModelConfig, group: str) -> tuple[tuple[int, int], ...]:
    """Return (out, in) of each of `modules_in`."""
    hidden, kind = config.hidden_size, group.partition(".")[0]
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if group in ("qkv", "o"):
        return ((query, hidden), (key, hidden), (key, hidden)) if group == "qkv" else ((hidden, query),)
    width, experts = config.intermediate_size, config.experts
    if experts is not None and kind == "experts":
        width = experts.width
    elif experts is not None and experts.shared is not None and kind == "shared":
        width = experts.shared.width
    return ((hidden, width),) if group.endswith("down") else ((width, hidden), (width, hidden))


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
    _refuse_options(data, _slides(data, layers, family), where)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(data, "vocab_size", where),
        intermediate_size=_integer(data, "intermediate_size", where),
        num_hidden_layers=layers,
        **_heads(data, where),
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(data, positions, where, may_be_partial=family.rotates_partly),
        max_position_embeddings=positions,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        qk_norm=_switch(family.qk_norm, data),
        norms_all_heads=family.norms_all_heads,
        qkv_bias=_switch(family.qkv_bias, data),
        o_bias=_switch(family.o_bias, data),
        mlp_bias=_switch(family.mlp_bias, data),
        dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
        experts=None if family.mixture is None else _experts(data, family.mixture, layers, where),
        unused_layers=int(data.get("num_nextn_predict_layers") or 0),
    )


def _experts(data: Mapping[str, Any], mixture: _Mixture, layers: int, where: str) -> ExpertsConfig:
    named = next((key for key in _COUNTS if data.get(key) is not None), "")
    count = _integer(data, named, where) if named else mixture.count
    per_token, width, groups, best = (
        _integer({"n_group": 1, "topk_group": 1, **data}, key, where)
        for key in ("num_experts_per_tok", mixture.width, "n_group", "topk_group")
    )
    if count % groups or (groups > 1 and count == groups) or per_token > count // groups * min(best, groups):
        raise SpecError(
            f"{where}: num_experts_per_tok is {per_token}, of {count} experts"
            + f" in {groups} groups, {best} of them for a token" * (groups > 1),
            hint="download the model again",
        )
    shared = math.prod(_integer(data, key, where) for key in mixture.shared_width)
    return ExpertsConfig(
        count,
        per_token,
        width,
        _switch(mixture.is_normalized, data),
        dense_layers=_dense_layers(data, layers, where),
        shared=_Shared(mixture.shared, shared, mixture.has_shared_gate) if mixture.shared else None,
        is_sigmoid=mixture.is_sigmoid,
        groups=groups,
        groups_per_token=best,
        scale=float(data.get("routed_scaling_factor") or 1.0),
        is_weighted_in_fp32=mixture.is_weighted_in_fp32,
        block=mixture.block,
        linears=mixture.linears,
    )


def _dense_layers(data: Mapping[str, Any], layers: int, where: str) -> frozenset[int]:
    """Return those that have no experts: the first few, those named, and all but every n-th."""
    first, named = data.get("first_k_dense_replace") or 0, data.get("mlp_only_layers") or ()
    step = _integer({"decoder_sparse_step": 1, **data}, "decoder_sparse_step", where)
    return frozenset(n for n in range(layers) if n < first or n in named or (n + 1) % step)


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


def _refuse_options(data: Mapping[str, Any], slides: bool, where: str) -> None:
    quantization = data.get("quantization_config")
    refused = {
        f"hidden_act {data.get('hidden_act')}": data.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding-window attention": slides,
        f"clip_qkv {data.get('clip_qkv')}": data.get("clip_qkv") is not None,
        f"quantization {(quantization or {}).get('quant_method')}": bool(quantization),
    }
    for option, found in refused.items():
        if found:
            raise SpecError(
                f"{where}: the builtin backend does not compute {option}",
                hint="use an unquantized checkpoint with full attention and silu of "
                f"{', '.join(_SUPPORTED)}, or another backend",
            )


def _slides(data: Mapping[str, Any], layers: int, family: _Family) -> bool:
    """Return whether any layer is not full attention: `layer_types` decides, else those from
    max_window_layers on slide; of mixtures, where transformers' models differ, any of them.
    """
    if data.get("layer_types"):
        return any(kind != "full_attention" for kind in data["layer_types"])
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    return window is not None and (family.mixture is not None or data.get("max_window_layers", 28) < layers)
