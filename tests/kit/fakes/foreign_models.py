"""Checkpoints of architectures that the builtin backend does not know: configuration and weights, no
tokenizer's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lorad.models.directory import resolve

HIDDEN, VOCAB, EXPERTS, LAYERS = 8, 112, 4, 2
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def make_moe(
    directory: Path,
    *,
    nested: bool = False,
    more: Mapping[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> None:
    """A mixture of experts with shared ones, fused in one layer and apart in the other; its head is untied.

    nested: the numbers are in `text_config`, as where a model also sees. more: shapes of other tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **changes,
    }
    named = {"architectures": ["MixMoeForCausalLM"], "model_type": "mix_moe"}
    (directory / "config.json").write_text(json.dumps(named | ({"text_config": text} if nested else text)))
    for name in TOKENIZER:
        if (source := resolve("builtin:tiny") / name).exists():
            (directory / name).write_bytes(source.read_bytes())
    others = {name: np.zeros(shape, np.float16) for name, shape in (more or {}).items()}
    save_file(tensors() | others, directory / "model.safetensors")


def tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.visual.blocks.0.attn.qkv.weight": (3 * HIDDEN, HIDDEN),
        "model.layers.0.mlp.experts.gate_up_proj": (EXPERTS, 8, HIDDEN),
        "model.layers.0.mlp.experts.down_proj": (EXPERTS, HIDDEN, 4),
        **{f"model.layers.1.mlp.experts.{e}.up_proj.weight": (4, HIDDEN) for e in range(EXPERTS)},
        **{f"model.layers.0.mlp.experts.{e}.up_proj.weight": (4, HIDDEN) for e in range(1)},
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (4, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (4, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{prefix}.mlp.shared_expert_gate.weight": (1, HIDDEN),
            f"{prefix}.mlp.shared_expert.up_proj.weight": (4, HIDDEN),
        }
    return {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}


def make_gpt2(directory: Path) -> None:
    """Its layers are Conv1D, whose weights are [in, out]; its head is the embedding."""
    numbers = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 1, "n_head": 2, "n_positions": 64}
    named = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(named | numbers))
    shapes = {
        "wte": (VOCAB, HIDDEN),
        "wpe": (64, HIDDEN),
        "h.0.attn.c_attn": (HIDDEN, 3 * HIDDEN),
        "h.0.attn.c_proj": (HIDDEN, HIDDEN),
        "h.0.mlp.c_fc": (HIDDEN, 4 * HIDDEN),
        "h.0.mlp.c_proj": (4 * HIDDEN, HIDDEN),
    }
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
