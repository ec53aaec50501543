"""The decode batch: full rows, bounded memory, samples that lose their place, prompts seen before, captured
steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lorad.engines.builtin import decode, steps
from lorad.engines.builtin.calls import Call, HeldLora, Sample
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.prefix import BLOCK, PrefixCache
from lorad.engines.builtin.steps import EagerSteps, Result
from lorad.models.base import Base
from lorad.models.decoder import hidden
from lorad.models.directory import linear_shapes, resolve
from lorad.models.kv import DecodeAttention, KVCache, bytes_per_token
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from lorad.models.merge import Merger
from lorad.protocol.batch import Prompt, Sampling
from tests.kit.fakes.random_adapters import random_adapter

NEVER = HeldLora("base", "base", None)
ENOUGH = 1 << 30
LONG_PROMPT = tuple(4 + n % 60 for n in range(3 * BLOCK + 5))


@pytest.fixture(scope="module")
def models() -> Merger:
    return Merger(load_base(resolve("builtin:tiny"), torch.float32, torch.device("cpu")))


def version(base: Base, seed: int, rank: int = 4) -> HeldLora:
    adapter = random_adapter(linear_shapes(base.config), seed, rank)
    return HeldLora(f"run@{seed}", adapter.digest(), FrozenLora(base, adapter.tensors, adapter.config.scale))


def call(
    held: HeldLora = NEVER,
    counts: Sequence[int] = (2, 2),
    new: int = 24,
    start: Sequence[int] = (5, 9, 7),
    stops: int = 0,
    **how: float,
) -> Call:
    """Prompts with so many samples each; about one token in 128 / stops ends a sample."""
    prompts = [
        Prompt(
            str(n), np.array([*start, 4 + n], np.int32), np.arange(100 * n, 100 * n + count, dtype=np.uint64)
        )
        for n, count in enumerate(counts)
    ]
    ends = tuple(range(3, 3 + stops))
    sampling = Sampling(new, temperature=2.0, stop_token_ids=ends, **how)  # type: ignore[arg-type]
    return Call("r", held, prompts, sampling, None)


def finish(batch: DecodeBatch, *calls: Call) -> list[Sample]:
    for one in calls:
        batch.join(one)
    while batch.calls:
        batch.run(60)
    return [sample for one in calls for sample in one.samples]


def same(made: Sequence[Sample], expected: Sequence[Sample]) -> bool:
    assert [one.tokens for one in made] == [one.tokens for one in expected]
    differences = [
        abs(np.array(a.logprobs) - np.array(b.logprobs)).max() for a, b in zip(made, expected, strict=True)
    ]
    return bool(max(differences) < 1e-4)


@pytest.mark.system
def test_preempted_samples_come_out_the_same(models: Merger) -> None:
    tokens = 500
    small = DecodeBatch(models, 64, tokens * bytes_per_token(models.base))
    sizes = watch(small, lambda: small.cache.slots * small.cache.length)
    made = finish(small, call(counts=[5, 5], new=250))
    assert small.preempted > 10 and max(sizes) <= tokens  # some of them more than once
    assert same(made, finish(DecodeBatch(models, 64, ENOUGH), call(counts=[5, 5], new=250)))


def test_lengths_of_caches_are_even(models: Merger) -> None:
    """A GPU's kernels copy scores of other lengths before they read them."""
    batch = DecodeBatch(models, 64, ENOUGH)
    own, shared = watch(batch, lambda: batch.cache.length), watch(batch, lambda: batch.prompts.cache.length)
    finish(batch, call(counts=[2], new=7), call(counts=[2], start=[9] * 300, new=33))
    assert {length % 16 for length in own + shared} == {0} and max(shared) == 304


@pytest.mark.system
def test_the_youngest_samples_give_way(models: Merger) -> None:
    small = DecodeBatch(models, 64, 500 * bytes_per_token(models.base))

    def is_oldest_first() -> bool:
        waiting = [one.number for group in small.pending for one in group.samples if one.tokens]
        return max(one.number for one in small.samples) < min(waiting, default=99)

    oldest_first = watch(small, is_oldest_first)
    finish(small, call(counts=[4, 4, 4], new=150, stops=3))
    assert small.preempted and all(oldest_first)


def test_one_sample_continues_whatever_the_budget(models: Merger) -> None:
    made = finish(DecodeBatch(models, 64, 1), call(counts=[3], new=20))
    assert [one.finish for one in made] == ["length"] * 3
    assert same(made, finish(DecodeBatch(models, 64, ENOUGH), call(counts=[3], new=20)))


def test_a_group_larger_than_the_batch_is_split(models: Merger) -> None:
    batch = DecodeBatch(models, 16, ENOUGH)
    rows = watch(batch, lambda: len(batch.samples))
    made = finish(batch, call(counts=[40], stops=10))
    assert max(rows) == 16
    assert same(made, finish(DecodeBatch(models, 64, ENOUGH), call(counts=[40], stops=10)))


@pytest.mark.system
def test_rows_stay_full_while_samples_wait(models: Merger) -> None:
    batch = DecodeBatch(models, 32, ENOUGH)
    rows = watch(batch, lambda: len(batch.samples) if batch.pending else 32)
    finish(batch, *(call(counts=[2] * 20, new=40, stops=12) for _ in range(6)))
    assert min(rows) >= 32 - 32 // decode.SHARE - 1
    assert np.mean(rows) > 0.9 * 32


def watch(batch: DecodeBatch, what: Callable[[], int]) -> list[int]:
    """`what()` before every step of the batch from now on."""
    seen: list[int] = []
    stepper = batch.stepper.run

    def run(*args: Any) -> Result:
        seen.append(what())
        return stepper(*args)

    batch.stepper.run = run  # type: ignore[assignment,method-assign]
    return seen


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens each prefill computed."""
    sizes: list[int] = []

    def counted(base: Base, ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        sizes.append(ids.numel())
        return hidden(base, ids, *rest, **more)

    monkeypatch.setattr("lorad.engines.builtin.prefix.hidden", counted)
    yield sizes


def test_prompt_prefix_is_computed_once_per_version(models: Merger, prefilled: list[int]) -> None:
    batch = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH))
    helds = [version(models.base, 1), version(models.base, 2)]
    for held in (helds[0], helds[0], helds[1]):
        finish(batch, call(held, counts=[2], start=LONG_PROMPT))
    whole = len(LONG_PROMPT) + 1
    assert prefilled == [whole, whole - 3 * BLOCK, whole]


def test_known_prompt_computes_only_its_last_block(models: Merger, prefilled: list[int]) -> None:
    batch = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH))
    calls = [call(counts=[1], start=LONG_PROMPT[: 2 * BLOCK - 1]) for _ in range(2)]
    first, again = finish(batch, calls[0]), finish(batch, calls[1])
    assert prefilled == [2 * BLOCK, BLOCK] and same(again, first)


def test_cached_prefixes_change_no_sample(models: Merger) -> None:
    held = version(models.base, 1)
    batch, plain = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH)), DecodeBatch(models, 64, ENOUGH)
    finish(batch, call(held, counts=[1], start=LONG_PROMPT[: 2 * BLOCK]))
    calls = [
        [call(held, [2, 1], start=LONG_PROMPT), call(held, [2], start=LONG_PROMPT[1:]), call(held, [3])]
        for _ in range(2)
    ]
    assert same(finish(batch, *calls[0]), finish(plain, *calls[1]))


def test_prefix_cache_evicts_within_its_budget(models: Merger, prefilled: list[int]) -> None:
    prefixes = PrefixCache(3 * BLOCK * bytes_per_token(models.base))
    batch = DecodeBatch(models, 64, ENOUGH, prefixes)
    for start in (LONG_PROMPT, LONG_PROMPT[::-1], LONG_PROMPT):
        finish(batch, call(counts=[1], start=start))
        assert prefixes.bytes <= prefixes.most_bytes and len(prefixes.blocks) == 3
    assert prefilled == [len(LONG_PROMPT) + 1] * 3


@pytest.mark.system
def test_long_row_survives_many_joining_short_rows(models: Merger) -> None:
    few = DecodeBatch(models, 256, 10_000 * bytes_per_token(models.base))
    long = tuple(4 + n % 60 for n in range(1000))
    work = [[call(counts=[1], new=40, start=long), call(counts=[4] * 30, new=20)] for _ in range(2)]
    few.join(work[0][0])
    few.run(0)
    made = [*finish(few, work[0][1]), *work[0][0].samples]
    finish(DecodeBatch(models, 256, ENOUGH), *work[1])
    assert same(made, [*work[1][1].samples, *work[1][0].samples])


def test_what_one_version_spoils_reaches_no_other(models: Merger) -> None:
    batch, bad = DecodeBatch(models, 64, ENOUGH), version(models.base, 1)
    assert bad.lora is not None
    for _, b in bad.lora.pairs.values():
        b.mul_(1e25)
    spoilt, stays, comes = (
        call(bad, [4], 20, start=LONG_PROMPT),
        call(counts=[1], new=60),
        call(counts=[4], start=LONG_PROMPT),
    )
    batch.join(spoilt)
    batch.join(stays)
    while spoilt in batch.calls:
        batch.run(0)
    assert all(one.is_spoilt for one in spoilt.samples)
    made = [*finish(batch, comes), *stays.samples]
    assert same(
        made,
        finish(
            DecodeBatch(models, 64, ENOUGH), call(counts=[4], start=LONG_PROMPT), call(counts=[1], new=60)
        ),
    )


def test_equal_tensors_with_another_alpha_share_nothing(models: Merger, prefilled: list[int]) -> None:
    batch, held = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH)), version(models.base, 1)
    adapter = random_adapter(linear_shapes(models.base.config), 1)
    halved = HeldLora(
        "run@2", held.digest, FrozenLora(models.base, adapter.tensors, adapter.config.scale / 2)
    )
    for one in (held, halved):
        finish(batch, call(one, counts=[1], start=LONG_PROMPT))
    assert prefilled[0] == prefilled[1]


def test_prefix_cache_keeps_beginnings_of_long_prompts(models: Merger, prefilled: list[int]) -> None:
    batch = DecodeBatch(models, 64, ENOUGH, PrefixCache(2 * BLOCK * bytes_per_token(models.base)))
    for _ in range(2):
        finish(batch, call(counts=[1], start=LONG_PROMPT))
    assert prefilled[0] - prefilled[1] == 2 * BLOCK


def test_rounded_steps_meet_few_attention_shapes(models: Merger, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each new shape costs; with the tokens of exact steps."""
    spans: list[int] = []

    class Seen(DecodeAttention):
        def __init__(self, cache: KVCache, positions: torch.Tensor, span: int, *rest: Any) -> None:
            spans.append(span)
            super().__init__(cache, positions, span, *rest)

    monkeypatch.setattr(steps, "DecodeAttention", Seen)
    rounded, exact = (DecodeBatch(models, 64, ENOUGH) for _ in range(2))
    rounded.stepper = EagerSteps(models, rounds=True)
    made = finish(rounded, call(new=40))
    assert len(spans) > 30 and len({*spans}) <= 2
    assert same(made, finish(exact, call(new=40)))


def test_steps_of_mixtures_are_rounded_on_gpus() -> None:
    base = load_base(resolve("builtin:tiny-moe"), torch.float32, torch.device("cpu"))
    found = [steps.stepper(Merger(replace(base, device=torch.device(name))), 0) for name in ("cpu", "cuda:0")]
    assert [isinstance(one, EagerSteps) and one.rounds for one in found] == [False, True]
