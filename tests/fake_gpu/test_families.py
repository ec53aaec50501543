"""Every family that lorad computes itself, and every rounding of a base, on the fake device."""

from typing import Any

import pytest

from tests.fake_gpu.cuda import fake_gpu
from tests.fake_gpu.scenes import (
    EXPERTS,
    Rounding,
    base_of,
    batch_of,
    call,
    config,
    even_experts,
    finish,
    gradients,
    mixture,
    slot_of,
    version,
    work_of,
)
from tests.fake_gpu.test_decoding import assert_fused

pytestmark = pytest.mark.system

_FEW = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
_FAR = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {
    "qwen3": config(),
    "qwen3_moe": mixture(),
    "llama": config(
        "LlamaForCausalLM",
        "llama",
        rope_scaling={"rope_type": "llama3", **_FAR, "original_max_position_embeddings": 8192},
    ),
    "qwen2": config("Qwen2ForCausalLM", "qwen2"),
    "tied heads": config(tie_word_embeddings=True),
    "olmoe": config("OlmoeForCausalLM", "olmoe", num_experts=8, num_experts_per_tok=2, intermediate_size=32),
    "mixtral": config("MixtralForCausalLM", "mixtral", **_FEW),
    "qwen2_moe": config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        shared_expert_intermediate_size=64,
        norm_topk_prob=False,
        **EXPERTS,
    ),
    "glm4_moe": config(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        use_qk_norm=True,
    ),
    "gpt_oss": config(
        "GptOssForCausalLM",
        "gpt_oss",
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"],
        **_FEW,
    ),
    "qwen3_5": config("Qwen3_5ForCausalLM", "qwen3_5_text", **_HYBRID),
    "qwen3_next": config(
        "Qwen3NextForCausalLM", "qwen3_next", shared_expert_intermediate_size=64, **_HYBRID, **EXPERTS
    ),
}
UNCAPTURED = {"qwen3_5", "qwen3_next"}  # the warm-up of a capture would change their states


def _decode(written: dict[str, Any], prompt: int, quantize: Rounding = None) -> int:
    """Decode some samples of two versions, and return how many steps were captured ones."""
    with fake_gpu() as gpu:
        base = base_of(written, quantize=quantize)
        gpu.fill = even_experts(gpu)
        finish(batch_of(base), [call(version(base, name), [3, 2], prompt, 4) for name in "ab"])
        assert_fused(gpu)
        return sum(graph.replays for graph in gpu.graphs)


def _train(written: dict[str, Any], quantize: Rounding = None) -> None:
    with fake_gpu(grad=True) as gpu:
        base = base_of(written, quantize=quantize)
        gpu.fill = even_experts(gpu)
        slot = slot_of(base, tokens=2048)
        gradients(base, slot, work_of(base, 2, 70, 60, per=4, ragged=30))
        assert_fused(gpu)
        assert slot.optim_step(1e-5, 1.0)[1]


@pytest.mark.parametrize("prompt", [100, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes(family: str, prompt: int) -> None:
    assert (_decode(FAMILIES[family], prompt) > 0) == (family not in UNCAPTURED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains(family: str) -> None:
    _train(FAMILIES[family])


@pytest.mark.parametrize("quantize", ["fp8", "nf4"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_rounded_bases_decode_and_train(family: str, quantize: Rounding) -> None:
    _decode(FAMILIES[family], 100, quantize)
    _train(FAMILIES[family], quantize)
