"""Attention with sinks and windows, as gpt-oss has it, in every way that lorad attends."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.engines.builtin.calls import Call, Sample
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.prefix import PrefixCache
from lorad.engines.builtin.prompts import NONE
from lorad.models.attention import Beside
from lorad.models.merge import Merger
from lorad.models.ops import clamped_swiglu
from lorad.trainers.builtin import blocks
from lorad.trainers.builtin.attention import PackedAttention
from lorad.trainers.builtin.blocks import Layout
from tests.engines.test_decode_batch import ENOUGH, LONG_PROMPT, NEVER, call, finish, same, version, watch
from tests.engines.test_shared_prompts import LONG, LONGER, alone
from tests.models.test_families import load, make_model
from tests.models.test_models import lean
from tests.models.test_ops import DTYPES, RUNS, assert_backward, randn

SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0])


@pytest.fixture(scope="module", params=[9, 30])
def models(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Merger:
    """Windows that end within what follows a prompt, and windows that reach into it."""
    base = tmp_path_factory.mktemp("base")
    sizes = {"vocab_size": 128, "max_position_embeddings": 1024, "sliding_window": request.param}
    make_model(base, "gpt_oss", **sizes)
    return Merger(load(base))


def plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Every sequence with its prompt before it, alone, with the sinks as scores of a key more."""
    out = torch.zeros_like(q)
    for start, length, owner in zip(RUNS.starts, RUNS.lengths, RUNS.owner, strict=True):
        own = np.arange(start, start + length)
        before = np.arange(RUNS.starts[owner], RUNS.starts[owner] + RUNS.lengths[owner] * (owner >= 0))
        seen = torch.from_numpy(np.concatenate([before, own]))
        keys, values = (t[0, seen].repeat_interleave(2, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[0, own], keys) / 4
        ages = torch.arange(len(before), len(seen))[:, None] - torch.arange(len(seen))
        scores = scores.masked_fill((ages < 0) | (ages >= (window or 99)), float("-inf"))
        every = torch.cat([scores, SINKS.to(scores)[:, None, None].expand(-1, len(own), 1)], -1)
        found = torch.einsum("hqk,khd->qhd", every.softmax(-1)[..., :-1], values)
        out = out.index_copy(1, torch.from_numpy(own), found[None])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("long", [256, 8, 0])
def test_packed_attention_is_that_of_autograd(
    models: Merger, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int, long: int
) -> None:
    monkeypatch.setattr(blocks, "LONG", long)
    base = replace(models.base, dtype=dtype, config=replace(models.base.config, windows=(window, 0)))
    attention, beside = PackedAttention(Layout(base, 30, RUNS).move()), Beside(SINKS.to(dtype), window)
    inputs = randn(1, 30, 4, 16), randn(1, 30, 2, 16, seed=1), randn(1, 30, 2, 16, seed=2)
    ours = partial(attention, 0, beside=beside)
    assert_backward(ours, partial(plain, window=window), dtype, *inputs)


def test_samples_of_shared_prompts_come_out_as_alone(models: Merger) -> None:
    def make() -> list[Call]:
        one, two = version(models.base, 1, rank=2), version(models.base, 2, rank=6)
        return [
            call(one, [3, 1, 5], new=20, start=LONG, stops=12),
            call(two, [2, 2], new=24, start=LONGER, stops=12),
            call(NEVER, [4, 1], new=16, start=LONG[:40], stops=12),
        ]

    batch = DecodeBatch(models, 64, ENOUGH)
    shared = watch(batch, lambda: int((batch.slots != NONE).sum()))
    made = finish(batch, *make())
    assert max(shared) > 8 and same(made, alone(models, make))
    assert_forward(models, made[0], [*LONG, 4], version(models.base, 1, rank=2))


def test_cached_prefixes_change_no_sample(models: Merger) -> None:
    batch, plain = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH)), DecodeBatch(models, 64, ENOUGH)
    finish(batch, call(counts=[1], start=LONG_PROMPT))
    calls = [[call(counts=[2, 1], start=LONG_PROMPT), call(counts=[3])] for _ in range(2)]
    made = finish(batch, *calls[0])
    assert same(made, finish(plain, *calls[1]))
    assert_forward(models, made[0], [*LONG_PROMPT, 4], NEVER)


def assert_forward(models: Merger, sample: Sample, prompt: list[int], held: Any) -> None:
    """The log-probabilities of a sample are those of one pass over it, at the temperature of `call`."""
    ids = torch.tensor([[*prompt, *sample.tokens]])
    scores = lean(models.base, ids, held.lora)[0, len(prompt) - 1 : -1]
    likely = F.log_softmax(scores / 2, -1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert (likely - torch.tensor(sample.logprobs)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    def plain(x: Tensor) -> Tensor:
        gate, up = x[:, :16].clamp(max=0.5), x[:, 16:].clamp(-0.5, 0.5)
        return (up + 1) * gate / (1 + torch.exp(-1.7 * gate))

    assert_backward(partial(clamped_swiglu, limit=0.5, gain=1.7), plain, dtype, randn(6, 32))
