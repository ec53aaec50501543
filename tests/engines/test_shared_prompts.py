"""The keys and values of a long prompt are kept once for all its samples, and each comes out as alone."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from lorad.engines.builtin import calls
from lorad.engines.builtin.calls import SHARED, Call, HeldLora, Sample
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.prompts import NONE
from lorad.engines.builtin.steps import GraphedSteps
from lorad.models import kv
from lorad.models.kv import bytes_per_token
from lorad.models.merge import Merger
from tests.engines.test_captured_steps import capture
from tests.engines.test_decode_batch import ENOUGH, NEVER, call, finish, models, same, version, watch

__all__ = ["models"]

LONG = [4 + n * n % 90 for n in range(SHARED + 40)]
LONGER = [4 + n * n % 90 for n in range(2 * SHARED)]
Make = Callable[[], Sequence[Call]]


def alone(models: Merger, make: Make) -> list[Sample]:
    """What every sample is where each row holds its prompt itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "SHARED", 1 << 30)
        batch = DecodeBatch(models, 64, ENOUGH)
        made = finish(batch, *make())
    assert not batch.prompts.cache.slots
    return made


def most(batch: DecodeBatch) -> list[int]:
    """Tokens of keys and values in the batch, before every step from now on."""
    return watch(batch, lambda: batch.cache.slots * batch.cache.length + batch.prompts.tokens())


def group(count: int, new: int, start: Sequence[int] = LONGER, stops: int = 0) -> list[Call]:
    return [call(NEVER, [count], new, start, stops)]


def mixed(models: Merger) -> list[Call]:
    """Two versions and the base; prompts of three lengths, one of them too short, one with one sample."""
    one, two = version(models.base, 1, rank=2), version(models.base, 2, rank=6)
    return [
        call(one, [3, 1, 5], new=10, start=LONG, stops=12),
        call(two, [2, 2], new=12, start=LONGER, stops=12),
        call(NEVER, [4, 1], new=8, start=LONG[:40], stops=12),
    ]


@pytest.fixture(scope="module")
def mixed_alone(models: Merger) -> list[Sample]:
    return alone(models, lambda: mixed(models))


def test_samples_come_out_as_alone(models: Merger, mixed_alone: list[Sample]) -> None:
    batch = DecodeBatch(models, 64, ENOUGH)
    shared = watch(batch, lambda: int((batch.slots != NONE).sum()))
    made = finish(batch, *mixed(models))
    assert max(shared) > 8 and same(made, mixed_alone)


def test_rows_hold_only_what_follows(models: Merger) -> None:
    batch = DecodeBatch(models, 64, ENOUGH)
    tokens = most(batch)
    made = finish(batch, *group(32, new=24))
    assert max(tokens) <= len(LONGER) + 1 + 32 * 100
    assert same(made, alone(models, partial(group, 32, new=24)))


def test_group_fits_where_its_copies_would_not(models: Merger) -> None:
    budget = len(LONGER) + 1 + 32 * 100
    batch = DecodeBatch(models, 64, budget * bytes_per_token(models.base))
    rows, tokens = watch(batch, lambda: len(batch.samples)), most(batch)
    finish(batch, *group(32, new=90))
    assert rows[0] == 32 and not batch.preempted and max(tokens) <= budget


@pytest.mark.system
def test_preempted_sample_continues_its_prompt(models: Merger) -> None:
    make = partial(group, 24, new=120, stops=6)
    batch = DecodeBatch(models, 64, (len(LONGER) + 1 + 800) * bytes_per_token(models.base))

    def resumed() -> int:
        rows = zip(batch.groups, batch.slots.tolist(), strict=True)
        return sum(len(group.tokens) > group.prompt and slot != NONE for group, slot in rows)

    rows = watch(batch, resumed)
    made = finish(batch, *make())
    assert max(rows) and same(made, alone(models, make))


def test_equal_prompts_of_calls_are_one(models: Merger) -> None:
    batch = DecodeBatch(models, 64, ENOUGH)
    slots = watch(batch, lambda: len(set(batch.slots.tolist())))
    lengths = watch(batch, lambda: int(batch.lengths.max()))

    def make() -> list[Call]:
        return group(4, 20) + group(1, 20)

    assert same(finish(batch, *make()), alone(models, make))
    assert max(slots) == 1 and max(lengths) < 20


def test_other_version_has_other_keys(models: Merger) -> None:
    helds = [version(models.base, seed) for seed in (1, 2)]

    def make() -> list[Call]:
        return [call(held, [3], 20, LONG) for held in helds]

    batch = DecodeBatch(models, 64, ENOUGH)
    slots = watch(batch, lambda: len(set(batch.slots.tolist())))
    assert same(finish(batch, *make()), alone(models, make)) and max(slots) == 2


@pytest.mark.system
def test_captured_steps_follow_shared_prompts(models: Merger, mixed_alone: list[Sample]) -> None:
    batch = DecodeBatch(models, 64, ENOUGH)
    batch.stepper = GraphedSteps(models, lambda: capture, ENOUGH)
    for _ in range(2):  # the second time from what was captured
        assert same(finish(batch, *mixed(models)), mixed_alone)
    assert len({shape.prompts for shape, _ in batch.stepper.graphs}) > 1


@pytest.mark.system
def test_fused_parts_come_out_as_alone(
    models: Merger, mixed_alone: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of a GPU, by its description: it lays out what it gives in its own way, and gives logsumexps
    of more queries than there are.
    """
    queries = []

    def kernel(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, _: bool) -> tuple[Tensor, ...]:
        queries.append(q.shape[2])
        scores = (q @ keys.mT) * q.shape[-1] ** -0.5 + bias
        total = scores.new_full((*q.shape[:2], -(-q.shape[2] // 32) * 32), torch.inf)
        total[:, :, : q.shape[2]] = scores.logsumexp(-1)
        return (scores.softmax(-1) @ values).transpose(1, 2).contiguous().transpose(1, 2), total

    monkeypatch.setattr(kv, "_is_fused", lambda keys: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", kernel)
    batch = DecodeBatch(models, 64, ENOUGH)
    batch.stepper = GraphedSteps(models, lambda: capture, ENOUGH)
    assert same(finish(batch, *mixed(models)), mixed_alone)
    assert len(set(queries)) > 1


@pytest.mark.system
def test_spoilt_prompt_harms_no_other(models: Merger) -> None:
    held = version(models.base, 1)
    assert held.lora is not None
    for a, _ in held.lora.pairs.values():
        a.fill_(torch.nan)
    batch, spoilt = DecodeBatch(models, 64, ENOUGH), call(held, [3], 2, LONGER)

    def make() -> list[Call]:
        return [*group(2, 60, LONG[:40]), *group(4, 20, LONG), *group(2, 20)]

    beside, *later = made = make()
    for one in (spoilt, beside):
        batch.join(one)
    while spoilt in batch.calls:
        batch.run(0)
    assert np.isnan(batch.prompts.cache.layers[-1].numpy()).any()
    finish(batch, *later)
    assert same([sample for one in made for sample in one.samples], alone(models, make))


def test_call_needs_prompts_once() -> None:
    held = HeldLora("base", "base", None)
    assert call(held, [32], new=90, start=LONGER).most_tokens == len(LONGER) + 1 + 32 * 90
    assert call(held, [32], new=90, start=LONGER[:8]).most_tokens == 32 * (9 + 90)
