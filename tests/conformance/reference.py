"""transformers and peft as the judge: a small random model, and what they say about a batch on it."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lorad.protocol.batch import Batch

VOCAB = 128


def write_random_model(directory: Path, **settings: Any) -> Path:
    """A random Qwen3 of two layers as a Hugging Face directory; it shards evenly over two ranks."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            **settings,
        }
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def with_biases(directory: Path) -> None:
    """Give the biases of a random model, which begin at zero, random numbers."""
    path, draw = directory / "model.safetensors", np.random.default_rng(0)
    tensors = load_file(path)
    for name in sorted(tensors):
        if name.endswith(".bias"):
            tensors[name] = draw.normal(0, 0.3, tensors[name].shape).astype(np.float32)
    save_file(tensors, path, {"format": "pt"})


def random_batch(seed: int, groups: int = 3, samples: int = 4) -> Batch:
    """Prompts of 3-9 tokens, completions of 1-8: lengths that do not line up."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCAB, rng.integers(low, high + 1)).astype(np.int32)

    return Batch.of([(tokens(3, 9), [tokens(1, 8) for _ in range(samples)]) for _ in range(groups)])


def reference_model(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    """The base in fp32, with a PEFT directory on top, its parameters trainable."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return model.eval() if adapter is None else adapted(model, adapter)


def adapted(model: torch.nn.Module, adapter: Path) -> torch.nn.Module:
    """A model with a PEFT directory in its layers, its parameters trainable."""
    with warnings.catch_warnings():
        # peft reads a property that transformers has deprecated
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()  # type: ignore[no-any-return]


def reference_logprobs(model: torch.nn.Module, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """[T], sample by sample, without padding; with a gradient."""
    found = []
    for prompt, completions in batch.groups():
        for completion in completions:
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
            scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
            found.append(scores.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(found)
