"""Every family that lorad computes itself, and every rounding of a base, on the fake device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from lorad.models.base import Base
from tests.fake_gpu.cuda import fake_gpu
from tests.fake_gpu.device import FakeGpu
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
# what each computes is in CI by test_decoding.py and test_training.py, or with other experts
_AGAIN = {"qwen3", "qwen3_moe", "olmoe", "mixtral", "qwen3_5"}
_EACH = [pytest.param(name, marks=pytest.mark.long if name in _AGAIN else ()) for name in FAMILIES]
UNCAPTURED = {"qwen3_5", "qwen3_next"}  # the warm-up of a capture would change their states


@contextmanager
def _on_gpu(
    written: dict[str, Any], grad: bool = False, quantize: Rounding = None
) -> Iterator[tuple[FakeGpu, Base]]:
    """Have a base of one layer on the fake device, of two where they are of two kinds; it must be fused."""
    kinds = written.get("layer_types", ["full_attention"])
    with fake_gpu(grad) as gpu:
        gpu.fill = even_experts(gpu)
        yield gpu, base_of({**written, "num_hidden_layers": len(kinds)}, quantize=quantize)
        assert_fused(gpu)


def _replays(gpu: FakeGpu, base: Base, prompts: Sequence[int]) -> list[int]:
    """Decode some samples of two versions for each length of a prompt; return how many steps were replays."""
    versions, counts = [version(base, name) for name in "ab"], []
    for prompt in prompts:
        gpu.forget()
        finish(batch_of(base), [call(held, [3, 2], prompt, 3) for held in versions])
        counts.append(sum(graph.replays for graph in gpu.graphs))
        assert_fused(gpu)
    return counts


def _train(base: Base) -> None:
    slot = slot_of(base, tokens=2048)
    gradients(base, slot, work_of(base, 2, 70, 60, per=4, ragged=30))
    assert slot.optim_step(1e-5, 1.0)[1]


@pytest.mark.parametrize("family", _EACH)
def test_every_family_decodes(family: str) -> None:
    with _on_gpu(FAMILIES[family]) as (gpu, base):
        replays = _replays(gpu, base, [100, 300])
    assert [count > 0 for count in replays] == [family not in UNCAPTURED] * 2


@pytest.mark.parametrize("family", _EACH)
def test_every_family_trains(family: str) -> None:
    with _on_gpu(FAMILIES[family], grad=True) as (_, base):
        _train(base)


@pytest.mark.parametrize("quantize", ["fp8", "nf4"])
@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.long), "qwen3_moe"])
def test_rounded_bases_decode_and_train(family: str, quantize: Rounding) -> None:
    with _on_gpu(FAMILIES[family], quantize=quantize) as (gpu, base):
        _replays(gpu, base, [100])
    with _on_gpu(FAMILIES[family], grad=True, quantize=quantize) as (_, base):
        _train(base)
