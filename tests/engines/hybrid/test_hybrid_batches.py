"""Rows of a hybrid base carry their states through the decode batch, whatever else happens to it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lorad.engines.builtin import steps
from lorad.engines.builtin.calls import SHARED, Call, Sample
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.prefix import BLOCK, PrefixCache
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.decoder import hidden, logits
from lorad.models.delta.states import bytes_per_row
from lorad.models.kv import bytes_per_token
from lorad.models.loading import load_base
from lorad.models.merge import Merger
from tests.engines.test_decode_batch import (
    ENOUGH,
    LONG_PROMPT,
    NEVER,
    call,
    finish,
    prefilled,
    same,
    version,
    watch,
)
from tests.engines.test_recorded_routes import asked, assert_whole, chunks_of
from tests.models.bases import write_hybrid

__all__ = ["prefilled"]

LONG = [4 + n * n % 90 for n in range(SHARED + 40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Merger:
    directory = tmp_path_factory.mktemp("hybrid")
    write_hybrid(directory)
    return Merger(load_base(directory, torch.float32, torch.device("cpu")))


def fresh(models: Merger) -> DecodeBatch:
    return DecodeBatch(models, 64, ENOUGH)


def mixed(models: Merger) -> list[Call]:
    """Versions and the base; prompts that rows share, and others."""
    versions = [version(models.base, 1, rank=2), version(models.base, 2, rank=6), NEVER]
    prompts = (LONG, LONG_PROMPT, LONG[:3])
    return [call(held, [3, 1, 4], 20, start, 12) for held, start in zip(versions, prompts, strict=True)]


def likely(base: Base, sample: Sample, start: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of a sample's tokens, from one forward over all of them."""
    ids = torch.tensor([[*start, 4 + int(sample.prompt), *sample.tokens]])
    with torch.no_grad():
        states = hidden(base, ids, torch.arange(ids.shape[1]), CausalAttention())
        scores = (logits(base, states[0, len(start) : -1]) / 2.0).log_softmax(-1)
    return scores.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("start", [LONG, LONG[:1]], ids=["shared", "own"])
def test_sampled_tokens_have_their_probabilities(models: Merger, start: Sequence[int]) -> None:
    made = finish(fresh(models), call(NEVER, [3, 2, 1], 40, start, stops=6))
    for sample in made:
        assert (torch.tensor(sample.logprobs) - likely(models.base, sample, start)).abs().max() < 2e-5


def test_samples_of_calls_come_out_as_alone(models: Merger) -> None:
    alone = [sample for one in mixed(models) for sample in finish(fresh(models), one)]
    assert same(finish(fresh(models), *mixed(models)), alone)


@pytest.mark.system
def test_preempted_samples_come_out_the_same(models: Merger) -> None:
    row = bytes_per_row(models.base)
    token = bytes_per_token(models.base)
    budget = 12 * row + 900 * token
    small = DecodeBatch(models, 64, budget)
    sizes = watch(small, lambda: small.cache.slots * (small.cache.length * token + row))
    made = finish(small, call(counts=[6, 6], new=150))
    assert small.preempted and max(sizes) <= budget
    assert same(made, finish(fresh(models), call(counts=[6, 6], new=150)))


def test_rows_are_bounded_by_their_states(tmp_path: Path) -> None:
    """However short they are."""
    write_hybrid(tmp_path, linear_key_head_dim=64, linear_value_head_dim=64)
    models = Merger(load_base(tmp_path, torch.float32, torch.device("cpu")))
    room = 70 * bytes_per_token(models.base)
    batch = DecodeBatch(models, 64, 5 * (bytes_per_row(models.base) + room))
    rows = watch(batch, lambda: len(batch.samples))
    assert same(finish(batch, call(counts=[19], new=4)), finish(fresh(models), call(counts=[19], new=4)))
    assert max(rows) == 5 and bytes_per_row(models.base) > room


@pytest.mark.system
def test_cached_prefixes_change_no_sample(models: Merger, prefilled: list[int]) -> None:
    """The first prompt leaves a state at its end, the second where it leaves the first, for the third."""
    batch = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH))
    head = LONG_PROMPT[: 2 * BLOCK]
    prompts = [LONG_PROMPT, (*head, *range(9, 99)), (*head, *range(7, 97)), LONG_PROMPT, LONG[:5]]
    for number, start in enumerate(prompts):
        prefilled.clear()
        made = finish(batch, call(counts=[2], start=start))
        assert sum(prefilled) == [198, 219, 91, 6, 6][number]
        assert same(made, finish(fresh(models), call(counts=[2], start=start)))


@pytest.mark.system
def test_prefixes_of_several_prompts_are_read_together(models: Merger) -> None:
    batch = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH))
    for start in (LONG_PROMPT, LONG[: 2 * BLOCK]):
        finish(batch, call(counts=[1], start=start))
    starts = (LONG_PROMPT, LONG, LONG[:9])
    made = finish(batch, *(call(counts=[2, 1], start=start) for start in starts))
    assert same(made, finish(fresh(models), *(call(counts=[2, 1], start=start) for start in starts)))


@pytest.mark.system
def test_cached_prefixes_keep_their_routes(tmp_path: Path) -> None:
    """Of a prompt that is computed in two parts, and of one that begins where another does."""
    write_hybrid(tmp_path, family="qwen3_next")
    models = Merger(load_base(tmp_path, torch.float32, torch.device("cpu")))
    batch = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH))
    for start in (LONG_PROMPT, LONG_PROMPT, LONG_PROMPT[: BLOCK + 9]):
        assert_whole(models, chunks_of(batch, asked(version(models.base, 1), [2, 1], start, 20)))


def test_states_count_in_the_prefix_budget(models: Merger) -> None:
    block = BLOCK * bytes_per_token(models.base) + bytes_per_row(models.base)
    prefixes = PrefixCache(2 * block)
    batch = DecodeBatch(models, 64, ENOUGH, prefixes)
    for seed in range(4):
        start = np.random.default_rng(seed).integers(5, 99, 70).tolist()
        finish(batch, call(counts=[1], start=start))
        assert prefixes.bytes == min(seed + 1, 2) * block
    assert prefixes.bytes == sum(block.bytes for block in prefixes.blocks.values())


def test_what_one_version_spoils_reaches_no_other(models: Merger) -> None:
    batch = fresh(models)
    bad = version(models.base, 1)
    assert bad.lora is not None
    for a, _ in bad.lora.pairs.values():
        a.fill_(torch.nan)
    spoilt = call(bad, [4], 2, LONG)
    calls = [call(counts=[2], new=30), call(counts=[4], start=LONG)]
    batch.join(spoilt)
    batch.join(calls[0])
    while spoilt in batch.calls:
        batch.run(0)
    finish(batch, calls[1])
    made = [sample for one in calls for sample in one.samples]
    assert same(made, finish(fresh(models), call(counts=[2], new=30), call(counts=[4], start=LONG)))


def test_steps_of_hybrids_are_never_captured(models: Merger) -> None:
    on_gpu = Merger(replace(models.base, device=torch.device("cuda:0")))
    found = steps.stepper(on_gpu, 0)
    assert isinstance(found, steps.EagerSteps) and found.rounds
