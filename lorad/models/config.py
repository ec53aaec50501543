"""What the forward must know of a model, from `config.json`; anything else is refused by name.

Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorad.errors import SpecError
from lorad.models.families import FAMILIES, LINEARS, Family, Mixture
from lorad.models.rope_parameters import RopeParameters, parse_rope, positive
from lorad.servers.table import NAMES

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Fused linear of a layer -> the Hugging Face modules in it, in the order of their output rows."""
_OF_DELTA = {
    "qkv": tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "b", "a", "z")),
    "o": ("linear_attn.out_proj",),
}
"""The same of a layer whose mixer is a gated delta net; the first of these goes through its convolution."""
_INTERLEAVED = tuple(f"linear_attn.in_proj_{name}" for name in ("qkvz", "ba"))
_MLP = ("gate_up", "down")
_KINDS = ("linear_attention", "full_attention")
_SUPPORTED = tuple(FAMILIES)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # transformers 5 writes the second


@dataclass(frozen=True, slots=True)
class _Shared:
    """The MLP that all tokens of a layer with experts go through.

    Attributes:
        name: The name of its module in a layer.
        width: Its intermediate size.
        is_gated: Whether its output is multiplied by a sigmoid of its input.
    """

    name: str
    width: int
    is_gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts that layers have in place of an MLP.

    Attributes:
        count: How many experts a layer has.
        per_token: How many of them a token goes through.
        width: The intermediate size of each expert.
        is_normalized: Whether the weights of a token's experts add up to one.
        dense_layers: The layers that have an MLP all the same.
        shared: The MLP that all tokens go through beside their experts.
        is_sigmoid: Whether scores are the sigmoid of logits, and not their softmax. Such scores are compared
            with a bias of each expert added, and only within the `groups_per_token` best of `groups` groups.
        scale: The factor of all weights.
        is_weighted_in_fp32: Whether weights stay float32, whatever the dtype of all else.
        block: The name in checkpoints of the module in a layer.
        linears: The names in checkpoints of an expert's gate, up and down.
        is_fused: Whether one tensor has the linears of all experts, and they and the router have biases.
        clamp: The limit and the gain of the activation, see `ops.clamped_swiglu`; None where it is silu.
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
    linears: tuple[str, str, str] = LINEARS
    is_fused: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta nets (arXiv 2412.06464) that layers have in place of attention.

    Attributes:
        layers: The layers that have one.
        kernel: How many tokens the convolution of keys, queries and values sees.
        is_interleaved: Whether two linears have what belongs to a key head side by side.
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_interleaved: bool = False

    @property
    def mixed(self) -> int:
        """Return how many numbers of a token the convolution mixes: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Return how many numbers the values of a token are."""
        return self.value_heads * self.value_dim

    @property
    def num_parameters(self) -> int:
        """Count the numbers of a layer beside its linears."""
        return self.mixed * self.kernel + 2 * self.value_heads + self.value_dim

    def state_bytes(self, width: int) -> int:
        """Return the bytes of a sequence's states in all layers, however long it is; what the convolution
        still sees has numbers of `width` bytes, all else is float32.
        """
        seen = width * (self.kernel - 1) * self.mixed
        return len(self.layers) * (4 * self.values * self.key_dim + seen)


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
    prefix: str = "model."
    """How the names of tensors in the checkpoint begin."""
    unread: tuple[str, ...] = ()
    """How names of tensors begin that the forward does not read: they predict later tokens, or see images."""
    has_sinks: bool = False
    """The softmax of each head has a number more, which no token stands for."""
    windows: tuple[int, ...] = ()
    """How many tokens a query of each layer sees at most, its own among them; 0, or empty: all."""
    delta: DeltaConfig | None = None
    """With it, norms multiply by their weight plus one, and the output of attention by a sigmoid that comes
    out of q_proj."""

    @property
    def num_parameters(self) -> int:
        """Count the numbers of the checkpoint that are computed with; tied embeddings count once."""
        hidden = self.hidden_size
        experts = self.experts
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        norms = 2 * hidden + self.qk_norm * (query + key if self.norms_all_heads else 2 * self.head_dim)
        biases = self.qkv_bias * (query + 2 * key) + self.o_bias * hidden
        queries = query * (1 + (self.delta is not None))
        each = (
            (query + queries + 2 * key) * hidden + norms + biases + self.has_sinks * self.num_attention_heads
        )
        inner = self.intermediate_size
        mixture = 0
        dense = 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)
        if experts is not None:
            mixture = experts.count * (self._of_expert + hidden + (experts.is_sigmoid or experts.is_fused))
            if experts.shared is not None:
                mixture += hidden * (3 * experts.shared.width + experts.shared.is_gated)
        layers = self.num_hidden_layers * (each + dense) + self._mixtures * (mixture - dense)
        if self.delta is not None:
            projected = self.delta.mixed + 2 * self.delta.values + 2 * self.delta.value_heads
            other = projected * hidden + self.delta.num_parameters + 2 * hidden
            layers += len(self.delta.layers) * (other - each)
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

    def has_delta(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

    @property
    def attentions(self) -> tuple[int, ...]:
        """Return the layers whose tokens have keys and values."""
        return tuple(layer for layer in range(self.num_hidden_layers) if not self.has_delta(layer))

    @property
    def _mixtures(self) -> int:
        return sum(map(self.has_experts, range(self.num_hidden_layers)))

    @property
    def _of_expert(self) -> int:
        if self.experts is None:
            return 0
        hidden = self.hidden_size
        width = self.experts.width
        return 3 * hidden * width + self.experts.is_fused * (2 * width + hidden)


def groups_of(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Return the fused linears that a layer has; an expert has `experts.0.gate_up` and the like, the MLP
    beside the experts has `shared.gate_up` and `shared.down`.
    """
    if config.experts is None or not config.has_experts(layer):
        return tuple(GROUPS)
    inner = [f"experts.{expert}.{group}" for expert in range(config.experts.count) for group in _MLP]
    return ("qkv", "o", *inner, *(f"shared.{group}" for group in _MLP if config.experts.shared))


def modules_in(config: ModelConfig, layer: int, group: str) -> tuple[str, ...]:
    """Return the Hugging Face modules in a fused linear of a layer, in the order of their output rows."""
    kind, _, linear = group.rpartition(".")
    if not kind and config.has_delta(layer) and group in _OF_DELTA:
        assert config.delta is not None
        return _INTERLEAVED if config.delta.is_interleaved and group == "qkv" else _OF_DELTA[group]
    if not kind:
        return GROUPS[group]
    assert config.experts is not None
    path = f"{config.experts.block}.{kind}"
    names = config.experts.linears
    if kind == "shared":
        assert config.experts.shared is not None
        path = config.experts.shared.name
        names = LINEARS
    return tuple(f"{path}.{name}" for name in (names[:2] if linear == "gate_up" else names[2:]))


def shapes_in(config: ModelConfig, layer: int, group: str) -> tuple[tuple[int, int], ...]:
    """Return (out, in) of each of `modules_in`."""
    hidden = config.hidden_size
    delta = config.delta
    if delta is not None and layer in delta.layers and group in _OF_DELTA:
        outs: tuple[int, ...] = (delta.mixed, delta.value_heads, delta.value_heads, delta.values)
        if delta.is_interleaved:
            outs = (delta.mixed + delta.values, 2 * delta.value_heads)
        return tuple((out, hidden) for out in outs) if group == "qkv" else ((hidden, delta.values),)
    kind = group.partition(".")[0]
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    if group in ("qkv", "o"):
        queries = query if delta is None else 2 * query
        return ((queries, hidden), (key, hidden), (key, hidden)) if group == "qkv" else ((hidden, query),)
    width = config.intermediate_size
    experts = config.experts
    if experts is not None and kind == "experts":
        width = experts.width
    elif experts is not None and experts.shared is not None and kind == "shared":
        width = experts.shared.width
    return ((hidden, width),) if group.endswith("down") else ((width, hidden), (width, hidden))


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a parsed `config.json`, which `where` names in errors.

    Raises: SpecError for an architecture or an option that the builtin forward does not compute.
    """
    model_type = data.get("model_type")
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = next(iter(data.get("architectures") or ()), None) or by_type.get(
        str(model_type), model_type or "none named"
    )
    other_type = name in FAMILIES and model_type not in (None, FAMILIES[name].model_type)
    if name not in FAMILIES or other_type:
        raise SpecError(
            f"{where}: the builtin backend does not know the architecture {name}"
            + (f" of model_type {model_type}" if other_type else ""),
            hint=f"supported: {', '.join(_SUPPORTED)}; other models need trainer.backend: megatron or fsdp, "
            f"and rollout.backend: {NAMES}",
        )
    architecture = str(name)
    family = FAMILIES[architecture]
    if family.is_hybrid:
        data = {**data, **(data.get("text_config") or {})}
    written = {key: value for key, value in data.items() if key != "rope_parameters" or value is not None}
    data = {**family.defaults, **written}
    layers, positions = (
        _integer(data, key, where) for key in ("num_hidden_layers", "max_position_embeddings")
    )
    windows = _windows(data, layers, where) if family.has_sinks else ()
    _refuse_options(data, layers, family, where)
    later = int(data.get("num_nextn_predict_layers") or 0)
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
        prefix=family.prefix,
        unread=family.unread or tuple(f"model.layers.{layers + extra}." for extra in range(later)),
        has_sinks=family.has_sinks,
        windows=windows,
        delta=_delta(data, layers, family, where) if family.is_hybrid else None,
    )


def _delta(data: Mapping[str, Any], layers: int, family: Family, where: str) -> DeltaConfig:
    interval = _integer(data, "full_attention_interval", where)
    kinds = data.get("layer_types") or [_KINDS[(layer + 1) % interval == 0] for layer in range(layers)]
    key_heads, value_heads, key_dim, value_dim, kernel = (
        _integer(data, f"linear_{name}", where)
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    if len(kinds) != layers or not {_KINDS[1]} <= {*kinds} <= {*_KINDS}:
        raise SpecError(
            f"{where}: layer_types is {kinds!r}, for {layers} layers",
            hint=f"each layer has one of {', '.join(_KINDS)}, and one the second; download the model again",
        )
    if value_heads % key_heads:
        raise SpecError(
            f"{where}: {value_heads} value heads over {key_heads} key heads",
            hint="linear_num_value_heads must be a multiple of linear_num_key_heads; download the model "
            "again",
        )
    linear = frozenset(layer for layer, kind in enumerate(kinds) if kind == _KINDS[0])
    return DeltaConfig(linear, key_heads, value_heads, key_dim, value_dim, kernel, family.is_interleaved)


def _experts(data: Mapping[str, Any], mixture: Mixture, layers: int, where: str) -> ExpertsConfig:
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
    leading = data.get("first_k_dense_replace") or 0
    dense = data.get("mlp_only_layers") or ()
    step = _integer({"decoder_sparse_step": 1, **data}, "decoder_sparse_step", where)
    return ExpertsConfig(
        count,
        per_token,
        width,
        _switch(mixture.is_normalized, data),
        dense_layers=frozenset(n for n in range(layers) if n < leading or n in dense or (n + 1) % step),
        shared=_Shared(mixture.shared, shared, mixture.has_shared_gate) if mixture.shared else None,
        is_sigmoid=mixture.is_sigmoid,
        groups=groups,
        groups_per_token=best,
        scale=float(data.get("routed_scaling_factor") or 1.0),
        is_weighted_in_fp32=mixture.is_weighted_in_fp32,
        block=mixture.block,
        linears=mixture.linears,
        is_fused=mixture.is_fused,
        clamp=(
            positive("swiglu_limit", data["swiglu_limit"], where),
            positive("swiglu_alpha", data["swiglu_alpha"], where),
        )
        if mixture.is_fused
        else None,
    )


def _heads(data: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the sizes of attention, which must fit each other."""
    hidden, heads = (_integer(data, key, where) for key in ("hidden_size", "num_attention_heads"))
    usual = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    for key in usual:
        if data.get(key) is not None:
            usual[key] = _integer(data, key, where)
    if heads % usual["num_key_value_heads"] or usual["head_dim"] % 2:
        raise SpecError(
            f"{where}: {heads} heads over {usual['num_key_value_heads']} kv heads of head_dim "
            f"{usual['head_dim']}",
            hint="heads must be a multiple of num_key_value_heads, and head_dim even; download the model "
            "again",
        )
    return {"hidden_size": hidden, "num_attention_heads": heads, **usual}


def _integer(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(
            f"{where}: {key} is {value!r}, not a positive integer", hint="download the model again"
        )
    return value


def _switch(rule: bool | str, data: Mapping[str, Any]) -> bool:
    return rule if isinstance(rule, bool) else bool(data.get(rule, False))


def _refuse_options(data: Mapping[str, Any], layers: int, family: Family, where: str) -> None:
    """Refuse what the builtin forward does not compute.

    A layer is not full attention where `layer_types` says so, else from max_window_layers on; of mixtures,
    where transformers' models differ, any layer might be. Raises SpecError.
    """
    quantization = data.get("quantization_config")
    if data.get("layer_types"):
        others = {*data["layer_types"]} - {*_KINDS[not family.is_hybrid :]}
        slides = bool(others)
    else:
        window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
        is_reached = family.mixture is not None or data.get("max_window_layers", 28) < layers
        slides = window is not None and is_reached
    refused = {
        f"hidden_act {data.get('hidden_act')}": data.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding-window attention": slides and not family.has_sinks,
        "biases of attention": family.is_hybrid and bool(data.get("attention_bias")),
        f"clip_qkv {data.get('clip_qkv')}": data.get("clip_qkv") is not None,
        f"quantization {(quantization or {}).get('quant_method')}": bool(quantization),
    }
    for option, value in refused.items():
        if value:
            raise SpecError(
                f"{where}: the builtin backend does not compute {option}",
                hint="use a conversion to bfloat16, as transformers saves it after loading with "
                "Mxfp4Config(dequantize=True)"
                if option == "quantization mxfp4"
                else "use an unquantized checkpoint with full attention and silu of "
                f"{', '.join(_SUPPORTED)}, or another backend",
            )


def _windows(data: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """Return `ModelConfig.windows`: `layer_types` says which layers slide, else every other, from the first
    on.
    """
    names = ("sliding_attention", "full_attention")
    kinds = data.get("layer_types") or [names[layer % 2] for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {*names}:
        raise SpecError(
            f"{where}: layer_types is {kinds!r}, for {layers} layers",
            hint=f"each layer has one of {', '.join(names)}; download the model again",
        )
    return tuple(_integer(data, "sliding_window", where) if kind == names[0] else 0 for kind in kinds)
