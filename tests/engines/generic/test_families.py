"""The engine over transformers computes what transformers and PEFT compute, whatever the family."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from lorad.adapters.adapter import Adapter
from lorad.engines.base import BASE, AdapterSource
from lorad.engines.generic.engine import TransformersEngine
from lorad.engines.generic.model import GenericModel
from lorad.models.compute import Compute
from lorad.protocol.batch import Prompt, Sampling
from tests.kit.fakes.random_adapters import random_adapter

_BARE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_COMMON = {**_BARE, "head_dim": 32}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_GATED = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {
    "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", {**_COMMON, **_GATED}),
    "gemma3": ("Gemma3ForCausalLM", {**_COMMON, **_SLIDING, "query_pre_attn_scalar": 32}),
    "glm4": ("Glm4ForCausalLM", _COMMON),
    "granite4": ("GraniteMoeHybridForCausalLM", {**_BARE, **_MAMBA}),
    "olmo3": ("Olmo3ForCausalLM", {**_COMMON, **_SLIDING}),
    "phi3": ("Phi3ForCausalLM", {**_BARE, "original_max_position_embeddings": 512}),
}
_NEW_TOKENS = (30, 12, 21, 5)
_LENGTHS = (5, 23, 40, 12)


@pytest.mark.parametrize("family", FAMILIES)
async def test_mixed_rows_are_what_peft_computes(family: str, tmp_path: Path) -> None:
    """Prompts of several lengths, each under its own version, are sampled together; rows leave one by one."""
    architecture, settings = FAMILIES[family]
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    kind(kind.config_class(**settings)).eval().float().save_pretrained(tmp_path)
    module = kind.from_pretrained(tmp_path).eval()
    shapes = {
        name: (linear.out_features, linear.in_features)
        for name, linear in module.named_modules()
        if isinstance(linear, torch.nn.Linear) and "layers." in name
    }
    adapters = {f"run@{number}": random_adapter(shapes, number) for number in (1, 2)}
    compute = Compute()
    model = GenericModel.opened(tmp_path, torch.float32, torch.device("cpu"), shapes)
    engine = TransformersEngine(model, compute, tmp_path, shapes, cache_bytes=2 << 30, mix_calls=True)
    for name, adapter in adapters.items():
        await engine.load(name, AdapterSource(adapter.digest(), adapter=adapter))
    generator = np.random.default_rng(3)
    texts = [generator.integers(5, 100, size).astype(np.int32) for size in _LENGTHS]
    versions = (BASE, "run@1", "run@2", "run@1")

    async def sampled(row: int) -> tuple[list[int], list[float]]:
        prompt = Prompt(f"p{row}", texts[row], np.array([row], np.uint64))
        tokens: list[int] = []
        logprobs: list[float] = []
        sampling = Sampling(max_new_tokens=_NEW_TOKENS[row])
        async for chunk in engine.generate(f"r{row}", versions[row], [prompt], sampling):
            tokens += chunk.tokens.tolist()
            logprobs += chunk.logprobs.tolist()
        return tokens, logprobs

    samples = await asyncio.gather(*(sampled(row) for row in range(4)))
    await engine.close()
    compute.close()
    for version in dict.fromkeys(versions):
        reference = module if version == BASE else _adapted(kind.from_pretrained(tmp_path), adapters[version])
        for row in range(4):
            if versions[row] != version:
                continue
            tokens, logprobs = samples[row]
            ids = torch.tensor([[*texts[row].tolist(), *tokens]])
            with torch.no_grad():
                scores = reference(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            expected = scores[len(texts[row]) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert np.abs(expected.numpy() - logprobs).max() < 1e-4


def _adapted(module: Any, adapter: Adapter) -> Any:
    """Put an adapter on a model of transformers, as PEFT computes it."""
    kind = module.config.model_type
    module.config.model_type = ""  # PEFT takes no out_proj of what it knows to be Mamba
    config = adapter.config
    lora = LoraConfig(r=config.rank, lora_alpha=int(config.alpha), target_modules=[*config.modules])
    model = get_peft_model(module, lora)
    module.config.model_type = kind
    for name, parameter in model.named_parameters():
        key = name.removeprefix("base_model.model.").replace(".default", "")
        if key in adapter.tensors:
            parameter.data = torch.from_numpy(adapter.tensors[key].copy())
    return model.eval()
