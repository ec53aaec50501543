"""The tables of rotary position embedding against transformers, at the sizes of published models."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lorad.models.config import parse_config
from lorad.models.rope import frequencies, rope_tables
from tests.models.test_families import rope_of
from tests.models.test_models import CPU

YARN_OPTIONS: list[dict[str, Any]] = [
    {"truncate": False},
    {"attention_factor": 1.3},
    {"mscale": 1.0, "mscale_all_dim": 0.8},
    {"beta_fast": 16.0, "beta_slow": 2.0},
]
PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qwen2.5-0.5b": (64, 32768, {"rope_theta": 1e6}),
    "qwen2.5-yarn": (128, 131072, rope_of("yarn", rope_theta=1e6, original_max_position_embeddings=32768)),
    "llama-3.1-8b": (128, 131072, rope_of("llama3", rope_theta=5e5, original_max_position_embeddings=8192)),
    "llama-3.2-1b": (
        64,
        131072,
        rope_of("llama3", factor=32.0, rope_theta=5e5, original_max_position_embeddings=8192),
    ),
    "linear": (128, 16384, rope_of("linear")),
    "dynamic": (128, 4096, rope_of("dynamic")),
    **{
        f"yarn-{next(iter(o))}": (128, 8192, rope_of("yarn", original_max_position_embeddings=2048) | o)
        for o in YARN_OPTIONS
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    dim, positions, rope = PUBLISHED[name]
    options = {"head_dim": dim, "max_position_embeddings": positions, "rope_parameters": dict(rope)}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **options))
    config = parse_config(AutoConfig.for_model("llama", **options).to_dict(), name)
    assert torch.equal(frequencies(config.rope, dim), theirs.inv_freq)
    last = torch.tensor([[0, 1, positions // 3, positions - 1]])
    cos, sin = theirs(torch.zeros(1), last)
    tables = rope_tables(config, torch.float32, CPU)
    assert (tables[0][last] - cos).abs().max() < 1e-6
    assert (tables[1][last][..., dim // 2 :] - sin[..., dim // 2 :]).abs().max() < 1e-6
