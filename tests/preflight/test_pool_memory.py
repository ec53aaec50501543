"""The memory of a pool by part: its arithmetic, and a real pool beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training.pool_memory import measured, model_of
from lorad.adapters.adapter import AdapterConfig
from lorad.backends.activations import kept
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.preflight import pool_memory as module
from lorad.preflight.pool_memory import Numbers, Step, pool_memory
from lorad.protocol.pool_setup import MAX_RUNNING, SERVER_SLOTS
from lorad.spec.model import convert

TINY = resolve("builtin:tiny")
FACTS = read_facts(TINY)
BASE, TOKEN = FACTS.bytes("float32"), kept(FACTS, 4).token
STEP = Step(prompts=2, samples=8, prompt=10, tokens=80)
MODULE = "model.layers.0.self_attn.q_proj"  # 128 -> 128
NUMBERS = Numbers(16 * 256)


def parts(device: str = "cpu", step: Step = STEP, **sections: Any) -> dict[str, int]:
    spec = convert({"lora": {"rank": 16}, "model": {"dtype": "float32"}, **sections})
    return pool_memory(spec, FACTS, AdapterConfig(16, 32.0, (MODULE,)), NUMBERS, step, device)


def test_builtin_pool_computes_prompts_once_per_group() -> None:
    found = parts()
    tokens = 2 * 10 + 80 - 8
    assert found["activations"] == tokens * TOKEN + 2 * tokens * FACTS.vocab * 4
    assert (found["bases"], found["adapter"], found["versions"]) == (BASE, 16 * NUMBERS[0], 16 * NUMBERS[0])
    assert "keys and values" not in found  # the same memory, at another time


def test_ranks_that_cut_sequences_hold_whole_adapters() -> None:
    cut, beside = (parts(trainer={"backend": "fsdp", axis: 2})["adapter"] for axis in ("cp", "dp"))
    assert cut == beside > parts(trainer={"backend": "fsdp"})["adapter"]


def test_ranks_compute_prompts_for_each_sample() -> None:
    one, two = (parts(trainer={"backend": "fsdp", "dp": dp}) for dp in (1, 2))
    assert one["activations"] == two["activations"] > parts()["activations"]
    assert one["bases"] == two["bases"] == 2 * BASE
    assert two["adapter"] - one["adapter"] == 2 * 4 * NUMBERS[0]  # weights and gradients once more
    assert two["processes"] > one["processes"]
    assert one["keys and values"] == 8 * 26 * FACTS.cached * 4


def test_fused_ranks_share_their_base_with_the_engine() -> None:
    pair: dict[str, Any] = {"rollout": {"backend": "transformers"}, "trainer": {"backend": "fsdp"}}
    fused, apart = parts(**pair), parts(**pair, pool={"mode": "resident"})
    assert (fused["bases"], apart["bases"]) == (BASE, 2 * BASE)
    assert fused["processes"] < apart["processes"]
    assert "gathered weights" not in fused and "gaps in the heap" not in apart


def test_servers_hold_slots_and_all_their_cache() -> None:
    sglang, vllm = (parts(rollout={"backend": backend}) for backend in ("sglang", "vllm"))
    slots = SERVER_SLOTS * 16 * FACTS.layers * 256 * 4
    assert sglang["versions"] - parts()["versions"] == slots
    assert sglang["keys and values"] == (MAX_RUNNING["cpu"] + 1) * 1024 * FACTS.cached * 4
    assert sglang["keys and values"] > vllm["keys and values"]


def test_micro_batches_bound_activations() -> None:
    large = Step(prompts=64, samples=512, prompt=100, tokens=512 * 200)
    ranks = {"backend": "fsdp"}
    least = parts(step=large, trainer={**ranks, "tokens_per_microbatch": 1000})["activations"]
    assert 1000 * TOKEN < least < parts(step=large, trainer=ranks)["activations"] < 150_000 * TOKEN


def test_recomputed_activations_are_fewer() -> None:
    kinds = [{"backend": name} for name in ("builtin", "fsdp", "megatron")]
    for kind in kinds:
        kept_, again = (
            parts(trainer={**kind, "activation_checkpointing": flag})["activations"] for flag in (False, True)
        )
        assert again < kept_


def test_what_fits_is_kept_beside_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Step(prompts=64, samples=512, prompt=100, tokens=512 * 20)
    monkeypatch.setattr(module, "_room", lambda *_: 2000 * TOKEN)
    mixed, recomputed = (
        parts(step=large, rollout={"backend": "vllm"}, trainer={"tokens_per_microbatch": 4000} | more)[
            "activations"
        ]
        for more in ({}, {"activation_checkpointing": True})
    )
    again = kept(FACTS, 4).recomputed
    assert mixed - recomputed == max(2000 * TOKEN, 4000 * again) - 4000 * again


def test_megatron_holds_the_square_of_its_tokens() -> None:
    tokens = 8 * 10 + 80 - 8
    fsdp, megatron = (parts(trainer={"backend": name})["activations"] for name in ("fsdp", "megatron"))
    scores = tokens**2 * 4 * 4 * FACTS.layers  # four heads
    assert scores < megatron - fsdp < 2 * scores


def test_lodger_on_a_gpu_counts_the_larger_side() -> None:
    asked: dict[str, Any] = {"trainer": {"backend": "fsdp"}, "rollout": {"backend": "vllm"}}
    lodger, beside = (parts("cuda:0", pool={"mode": mode}, **asked) for mode in ("timesliced", "resident"))
    assert (lodger["bases"], beside["bases"]) == (BASE, 2 * BASE)
    assert "processes" not in lodger and "keys and values" not in lodger


@pytest.mark.system
@pytest.mark.skipif(torch.version.cuda is not None, reason="processes were measured with torch for CPUs")
def test_real_pool_takes_what_was_said(tmp_path: Path) -> None:
    found = measured("builtin", "builtin", model_of("tiny", tmp_path), steps=2)
    assert abs(found.error) < 0.25, (found.estimate, found.peak)
