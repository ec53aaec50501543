"""Random models of the shape of Qwen3 and Qwen3-MoE, written as a user would have downloaded them: shards of
safetensors, `config.json`, and the tokenizer of `builtin:tiny` with as many words as they have.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_day.sizes import GIB
from benchmarks.gpu_day.stage import Place, play
from lorad.models.config import ModelConfig, parse_config
from lorad.models.directory import INDEX, linear_shapes, read_json, resolve

_SHARD = 4 * GIB
_HEAD_SCALE = 3.0  # so that a random base does not find all words equally likely


def model(place: Place) -> None:
    for directory, numbers, family in (
        (place.dense, place.size.model, "Qwen3"),
        (place.experts, place.size.experts, "Qwen3Moe"),
    ):
        began = time.perf_counter()
        config = write_model(directory, family, numbers, place.device)
        place.say(f"{directory.name}.write_s", time.perf_counter() - began)
        place.say(f"{directory.name}.parameters_m", config.num_parameters / 1e6)
        written = sum(path.stat().st_size for path in directory.iterdir())
        place.say(f"{directory.name}.gib", written / GIB)


def write_model(directory: Path, family: str, numbers: Mapping[str, int], device: str) -> ModelConfig:
    """Write a whole directory. Its numbers are made on the device, in bfloat16 and by a fixed seed."""
    directory.mkdir(parents=True)
    data = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": {"Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}[family],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "norm_topk_prob": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **numbers,
    }
    (directory / "config.json").write_text(json.dumps(data))
    config = parse_config(data, str(directory / "config.json"))
    _write_shards(directory, _weights(config, device))
    _write_tokenizer(directory, config.vocab_size)
    return config


def _weights(config: ModelConfig, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor by its name in the file."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = config.hidden_size

    def random(out: int, into: int) -> Tensor:
        made = torch.randn(out, into, generator=generator, device=device)
        return made.mul_(into**-0.5).to(torch.bfloat16).cpu()

    yield "model.embed_tokens.weight", random(config.vocab_size, hidden)
    for name, (out, into) in linear_shapes(config).items():
        yield f"{name}.weight", random(out, into) * (_HEAD_SCALE if name == "lm_head" else 1.0)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.num_hidden_layers):
        for name, size in norms.items():
            yield f"model.layers.{layer}.{name}.weight", torch.ones(size, dtype=torch.bfloat16)
        if config.experts is not None:
            yield f"model.layers.{layer}.mlp.gate.weight", random(config.experts.count, hidden)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def _write_shards(directory: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    where: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(where.values())) + 1}.safetensors"
        save_file(shard, directory / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights:
        shard[name] = tensor
        if sum(part.nbytes for part in shard.values()) >= _SHARD:
            write()
    if shard:
        write()
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _write_tokenizer(directory: Path, words: int) -> None:
    tiny = resolve("builtin:tiny")
    tokenizer = read_json(tiny / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({f"<{word}>": word for word in range(len(vocabulary), words)})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((tiny / name).read_bytes())


if __name__ == "__main__":
    play(model)
