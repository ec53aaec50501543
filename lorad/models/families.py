"""The families that lorad computes itself. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Mixture:
    """What transformers' code fixes for a family's mixtures of experts.

    For the rest of the fields see `ExpertsConfig`.

    Attributes:
        count: The number of experts where `config.json` leaves it out.
        width: The field that has the intermediate size of an expert.
        is_normalized: True, False, or the field that decides.
        shared_width: The fields whose product is the intermediate size of the MLP of all tokens.
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
    linears: tuple[str, str, str] = LINEARS
    is_fused: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What transformers' code fixes for an architecture.

    A bias or a norm is there always, never, or where the field of that name says so.
    """

    model_type: str
    qk_norm: bool | str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that `config.json` leaves out."""
    mixture: Mixture | None = None
    norms_all_heads: bool = False
    rotates_partly: bool = False
    has_sinks: bool = False
    is_hybrid: bool = False
    """Layers are gated delta nets or gated attention, and norms multiply by their weight plus one."""
    is_interleaved: bool = False
    """Gated delta nets have what belongs to a key head side by side, in two linears."""
    prefix: str = "model."
    """How the names of tensors in checkpoints begin."""
    unread: tuple[str, ...] = ()
    """How names of tensors begin that the forward does not read."""


def _hybrid(
    model_type: str, prefix: str = "model.", kv_heads: int = 4, mixture: Mixture | None = None
) -> Family:
    """Return Qwen3.5, alone or as the language model of one that sees images; with a mixture, Qwen3-Next."""
    defaults = {
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    if mixture is not None:
        defaults |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        defaults |= {"num_experts_per_tok": 10, "norm_topk_prob": True}
    return Family(
        model_type,
        True,
        False,
        False,
        False,
        defaults,
        mixture,
        rotates_partly=True,
        is_hybrid=True,
        is_interleaved=mixture is not None,
        prefix=prefix,
        unread=("mtp.", "model.visual."),
    )


FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", False, True, False, False, {"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": Family(
        "qwen3", True, "attention_bias", "attention_bias", False, {"num_key_value_heads": 32, "head_dim": 128}
    ),
    "LlamaForCausalLM": Family("llama", False, "attention_bias", "attention_bias", "mlp_bias"),
    "Qwen2MoeForCausalLM": Family(
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
        Mixture(
            60,
            shared="mlp.shared_expert",
            shared_width=("shared_expert_intermediate_size",),
            has_shared_gate=True,
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
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
        Mixture(128),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        True,
        "attention_bias",
        "attention_bias",
        False,
        {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        Mixture(64, "intermediate_size"),
        norms_all_heads=True,
    ),
    "MixtralForCausalLM": Family(
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
        Mixture(
            8,
            "intermediate_size",
            True,
            is_weighted_in_fp32=True,
            block="block_sparse_moe",
            linears=("w1", "w3", "w2"),
        ),
    ),
    "Glm4MoeForCausalLM": Family(
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
        Mixture(
            128,
            shared="mlp.shared_experts",
            shared_width=("moe_intermediate_size", "n_shared_experts"),
            is_sigmoid=True,
            is_weighted_in_fp32=True,
        ),
        rotates_partly=True,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        False,
        "attention_bias",
        "attention_bias",
        False,
        {
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        Mixture(128, "intermediate_size", True, is_fused=True),
        has_sinks=True,
    ),
    "Qwen3_5ForCausalLM": _hybrid("qwen3_5_text"),
    "Qwen3_5ForConditionalGeneration": _hybrid("qwen3_5", "model.language_model."),
    "Qwen3NextForCausalLM": _hybrid(
        "qwen3_next",
        kv_heads=2,
        mixture=Mixture(
            512,
            shared="mlp.shared_expert",
            shared_width=("shared_expert_intermediate_size",),
            has_shared_gate=True,
        ),
    ),
}
FUSED = frozenset(one.model_type for one in FAMILIES.values() if one.mixture and one.mixture.is_fused)
"""Model types whose checkpoints hold a layer's experts in one tensor, the outputs of gate and up by turns."""
