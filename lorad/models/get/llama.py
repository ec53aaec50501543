"""Write a Llama of a GGUF file as a Hugging Face directory: config, weights, tokenizer, template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lorad.adapters.tensors import bfloat16_bits, serialized
from lorad.models.get.gguf import Gguf

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL = 3  # the type of a token that has a meaning and no text
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPLITS = {  # by `tokenizer.ggml.pre`, as the tokenizers that these names stand for have it
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
}


def write_llama(source: Gguf, directory: Path) -> None:
    """Write the model into a directory that exists.

    Raises ValueError for another architecture or another kind of tokenizer than lorad knows.
    """
    facts = source.facts
    kind = (facts["general.architecture"], facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"])
    if kind[:2] != ("llama", "gpt2") or kind[2] not in _SPLITS:
        raise ValueError(f"a model of {', '.join(kind)}, and lorad converts llama, gpt2, smollm")
    tokens = facts["tokenizer.ggml.tokens"]
    ids = {word: facts[f"tokenizer.ggml.{word}_token_id"] for word in ("bos", "eos")}
    ids["pad"] = facts["tokenizer.ggml.padding_token_id"]
    generation = {f"{word}_token_id": number for word, number in ids.items()}
    of_model = {key.removeprefix("llama."): value for key, value in facts.items()}
    heads = of_model["attention.head_count"]
    config: dict[str, Any] = {  # as transformers writes it for a Llama
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": len(tokens),
        "hidden_size": of_model["embedding_length"],
        "intermediate_size": of_model["feed_forward_length"],
        "num_hidden_layers": of_model["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": of_model["attention.head_count_kv"],
        "head_dim": of_model["embedding_length"] // heads,
        "max_position_embeddings": of_model["context_length"],
        "rms_norm_eps": float(str(np.float32(of_model["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": of_model["rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in source.names,
        **generation,
    }
    about = {f"{word}_token": tokens[number] for word, number in ids.items()} | {
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": _tokenizer(facts),
        "tokenizer_config.json": about,
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
    (directory / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], "utf-8")
    with (directory / "model.safetensors").open("wb") as file:
        file.writelines(serialized(dict(_weights(source, config))))


def _weights(source: Gguf, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor under the name that transformers has for it, as bits of bfloat16."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in source.names:
        values = source.tensor(name)
        if (target := _OUTSIDE.get(name)) is None:
            _, layer, module, _ = name.split(".")
            target = f"model.layers.{layer}.{_MODULES[module]}.weight"
            if module in heads:  # llama.cpp turns neighbours by RoPE, transformers the two halves of a head
                pairs = values.reshape(heads[module], -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield target, bfloat16_bits(values)


def _tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer.json` of a byte-level BPE."""
    tokens = facts["tokenizer.ggml.tokens"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [number for number, kind in enumerate(facts["tokenizer.ggml.token_type"]) if kind == _CONTROL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": tokens[number], **plain} for number in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[facts["tokenizer.ggml.pre"]]},
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": facts["tokenizer.ggml.merges"],
        },
    }
