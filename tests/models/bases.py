"""Tiny random checkpoints with the classes, the nesting of config.json, the names of tensors and the layers
for later tokens that repositories of late 2026 have.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from lorad.models.directory import resolve

_SPREAD = 0.08  # of random weights: far from uniform scores, far from saturation
_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_BARE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "initializer_range": _SPREAD,
    **_IDS,
}
_COMMON = {**_BARE, "head_dim": 32}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_QWEN: dict[str, Any] = {
    "text_config": {
        **_COMMON,
        **_HYBRID,
        "full_attention_interval": 2,  # as `layer_types` say; SGLang reads this one
        # as published: SGLang turns a quarter of each head, whatever config.json says
        "rope_parameters": {
            **_PARTIAL,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    },
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 65536, "shortest_edge": 1024},
}
_PIXTRAL_IMAGES = {
    "image_processor_type": "PixtralImageProcessorFast",
    "processor_class": "PixtralProcessor",
    "patch_size": 14,
    "size": {"longest_edge": 56},
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES = {**_TOWER, "image_size": 56, "patch_size": 14}
_GRANITE = {
    **_BARE,
    "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
}
_NEMOTRON = {
    **_COMMON,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "chunk_size": 32,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _QWEN),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {**_QWEN, "text_config": {**_QWEN["text_config"], **_MIXTURE}},
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_COMMON, **_HYBRID, **_MIXTURE, "rope_parameters": _PARTIAL}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {**_COMMON, **_SLIDING, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**_COMMON, **_SLIDING, "query_pre_attn_scalar": 32},
            "vision_config": {**_IMAGES, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": 120,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **_COMMON,
                **_SLIDING,
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 128,
                "tie_word_embeddings": True,
                "final_logit_softcapping": 30.0,
            },
            "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "default_output_length": 4},
            "audio_config": None,
            "image_token_id": 120,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "ministral3", **_COMMON},
            "vision_config": {"model_type": "pixtral", **_IMAGES, "head_dim": 16},
            "image_token_index": 120,
            "tie_word_embeddings": False,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {**_COMMON, "rope_parameters": _PARTIAL}),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    "granite4_moe": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h": ("NemotronHForCausalLM", {**_NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention"]}),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        {
            **_NEMOTRON,
            "layers_block_type": ["mamba", "moe", "attention"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {**_COMMON, "no_rope_layers": [1, 0]}),
    "olmo3": ("Olmo3ForCausalLM", {**_COMMON, **_SLIDING}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            **_BARE,
            "original_max_position_embeddings": 2048,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.75},
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **_COMMON,
                "intermediate_size_mlp": 128,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "no_rope_layers": [1, 0],
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                **_IMAGES,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 120,
        },
    ),
}
_PREFIXES = {
    "qwen3_5": "model.language_model.",
    "qwen3_5_moe": "model.language_model.",
    "qwen3_next": "model.",
}
"""What comes before `layers` in the files of families that predict later tokens."""


def write_base(directory: Path, family: str, **options: Any) -> None:
    """Write a checkpoint of a family. options: of config.json, beside or instead of its own."""
    architecture, settings = FAMILIES[family]
    _write(directory, architecture, {**settings, **options}, _PREFIXES.get(family))


def write_hybrid(directory: Path, *, alone: bool = False, family: str = "qwen3_5", **options: Any) -> None:
    """Write Qwen3.5 or Qwen3-Next of four layers whose states remember more than a few tokens.

    alone: without a tower and layers for later tokens, as the class of the language model has it.
    options: of the language model.
    """
    kinds = [f"{kind}_attention" for kind in ("linear", "full", "full", "linear")]
    sizes = {"num_hidden_layers": 4, "layer_types": kinds, **options}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    text = {**_QWEN["text_config"], **heads, **sizes}
    if family == "qwen3_next":
        architecture, settings = FAMILIES[family]
        _write(directory, architecture, {**settings, **sizes}, _PREFIXES[family])
    elif alone:
        _write(directory, "Qwen3_5ForCausalLM", text, None)
    else:
        whole = {**_QWEN, "text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
        _write(directory, "Qwen3_5ForConditionalGeneration", whole, _PREFIXES["qwen3_5"])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor.sub_(5)
    save_file(tensors, path, {"format": "pt"})


def _write(directory: Path, architecture: str, settings: dict[str, Any], prefix: str | None) -> None:
    kind = getattr(transformers, architecture)
    config = kind.config_class(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval().float()
        for name, parameter in model.named_parameters():  # away from 0 and 1, so that a mistake shows
            if parameter.dim() == 1 and "A_log" not in name and "dt_bias" not in name:
                parameter.data += torch.randn_like(parameter) * 0.1
        model.save_pretrained(directory)
        path = directory / "model.safetensors"
        tensors = load_file(path)
        if architecture.startswith("Gemma3"):  # transformers 5.23 writes shorter names than are published
            tensors = {
                name.replace("vision_tower.", "vision_tower.vision_model."): tensor
                for name, tensor in tensors.items()
            }
        if prefix:
            tensors |= _later(tensors, f"{prefix}layers.1.")
    save_file(tensors, path, {"format": "pt"})
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**data, "architectures": [architecture]}))


def write_spoken_base(directory: Path, family: str) -> None:
    """Write a checkpoint of a family with the tokenizer of builtin:tiny, for whole runs.

    Those of Qwen3.5 and Ministral 3 have settings of images, without which SGLang does not start.
    """
    write_base(directory, family)
    images = _QWEN_IMAGES if family.startswith("qwen3_5") else _PIXTRAL_IMAGES if family == "mistral3" else {}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json") if images else ():
        (directory / name).write_text(json.dumps(images))
    for file in resolve("builtin:tiny").glob("*tokenizer*"):
        shutil.copy(file, directory / file.name)


def _later(tensors: dict[str, torch.Tensor], last: str) -> dict[str, torch.Tensor]:
    """Return the layer that predicts later tokens: a copy of the last one, and what joins it to the model."""
    layer = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    later = {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    return {**later, "mtp.norm.weight": torch.ones(64), "mtp.fc.weight": torch.randn(64, 128) * _SPREAD}
