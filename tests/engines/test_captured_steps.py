"""Steps that are captured once and replayed on the same tensors, as on a GPU, give what exact ones give."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.steps import Capture, Captured, GraphedSteps, Outcome
from lorad.models.kv import bytes_per_token
from lorad.models.merge import Merger
from tests.engines.test_decode_batch import ENOUGH, NEVER, call, finish, models, same, version, watch

__all__ = ["models"]


class _Tape(TorchDispatchMode):
    """Keeps which operations a step does on which tensors, to do them again on the same ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Callable[[], Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        do = functools.partial(func, *args, **(kwargs or {}))
        self._steps.append((do, do()))
        return self._steps[-1][1]

    @torch.no_grad()
    def replay(self) -> None:
        for do, made in self._steps:
            for old, new in zip(tree_leaves(made), tree_leaves(do()), strict=True):
                if new.data_ptr() != old.data_ptr():  # views are of the same memory already
                    old.copy_(new)


def capture(run: Captured) -> Captured:
    """What a CUDA graph does, on a CPU: it runs the step to warm up, then keeps its operations and their
    tensors.
    """
    run()
    with _Tape() as tape:
        outcome = run()

    def replay() -> Outcome:
        tape.replay()
        return outcome

    return replay


def graphed(models: Merger, captured: list[int] | None = None) -> DecodeBatch:
    """A batch with captured steps; `captured` gets the number of the capturer for each of them."""
    batch, numbers = DecodeBatch(models, 64, ENOUGH), itertools.count()

    def capturing() -> Capture:
        number = next(numbers)

        def numbered(run: Captured) -> Captured:
            if captured is not None:
                captured.append(number)
            return capture(run)

        return numbered

    batch.stepper = GraphedSteps(models, capturing, ENOUGH)
    return batch


@pytest.mark.system
def test_captured_steps_give_what_exact_ones_give(models: Merger) -> None:
    helds = [version(models.base, 1, rank=2), version(models.base, 2, rank=6), NEVER]
    batch = graphed(models)
    work = [[call(held, [3, 2], 12, stops=40) for held in helds] for _ in range(2)]
    assert same(finish(batch, *work[0]), finish(DecodeBatch(models, 64, ENOUGH), *work[1]))
    assert isinstance(batch.stepper, GraphedSteps)
    assert {shape.rows for shape, _ in batch.stepper.graphs} > {2, 4}


@pytest.mark.system
@pytest.mark.parametrize("counts", [(4, 4), (3, 1), (3, 4), (1, 9)])
def test_captured_step_follows_changed_row_owners(models: Merger, counts: tuple[int, int]) -> None:
    helds = [version(models.base, 1), version(models.base, 2)]
    batch = graphed(models)
    for many in ((4, 4), counts, (4, 4)):
        work = [
            [call(held, [count], new=3) for held, count in zip(helds, many, strict=True)] for _ in range(2)
        ]
        assert same(finish(batch, *work[0]), finish(DecodeBatch(models, 64, ENOUGH), *work[1]))


def test_captured_step_serves_the_last_bound_version(models: Merger) -> None:
    captured: list[int] = []
    batch, seen = graphed(models, captured), []
    for seed in (1, 2, 3):
        held = version(models.base, seed)
        assert same(
            finish(batch, call(held, [4], new=6)), finish(DecodeBatch(models, 64, ENOUGH), call(held, [4], 6))
        )
        seen.append(len(captured))
    assert seen == [1, 1, 1]


@pytest.mark.system
def test_adapter_keeps_its_place_as_rows_end(models: Merger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.engines.builtin.steps.BANKS", 1)
    captured: list[int] = []
    batch, seen = graphed(models, captured), []
    for _ in range(2):
        finish(batch, call(version(models.base, 1), [9], 12, stops=60))
        seen.append(len(captured))
    assert seen[0] == seen[1] > 2


@pytest.mark.system
def test_padding_counts_against_the_memory(models: Merger) -> None:
    batch = DecodeBatch(models, 64, 1000 * bytes_per_token(models.base))
    batch.stepper = GraphedSteps(models, lambda: lambda run: run, ENOUGH)
    sizes = watch(batch, lambda: batch.cache.slots * batch.cache.length)
    made = finish(batch, call(counts=[17], new=100))
    assert max(sizes) <= 1000
    assert same(made, finish(DecodeBatch(models, 64, ENOUGH), call(counts=[17], new=100)))


@pytest.mark.system
def test_moved_cache_is_captured_again(models: Merger) -> None:
    captured: list[int] = []
    batch = graphed(models, captured)
    for new in (6, 100):
        finish(batch, call(counts=[4], new=new))
    assert captured[0] < captured[-1]


def test_lent_cache_comes_back_where_it_was(models: Merger) -> None:
    captured: list[int] = []
    batch = graphed(models, captured)
    held = version(models.base, 1)
    first = finish(batch, call(held, [3], new=6))
    seen = len(captured)
    parts = batch.lend()
    assert parts and sum(part.numel() for part in parts) == sum(layer.nbytes for layer in batch.cache.layers)
    for part in parts:
        part.fill_(255)  # NaN
    assert same(finish(batch, call(held, [3], new=6)), first)
    assert len(captured) == seen
    batch.join(call(held))
    assert batch.lend() is None


@pytest.mark.system
def test_idle_rows_change_no_sample_near_the_limit(models: Merger) -> None:
    most = models.base.config.max_position_embeddings
    start = tuple(4 + n % 60 for n in range(most - 9))
    batch = graphed(models)
    for count in (4, 3):
        work = [call(counts=[count], new=8, start=start) for _ in range(2)]
        assert same(finish(batch, work[0]), finish(DecodeBatch(models, 64, ENOUGH), work[1]))


@pytest.mark.parametrize(
    ("tokens", "span"), [(1, 256), (257, 512), (1025, 1280), (2049, 2560), (5000, 5120), (20000, 20480)]
)
def test_few_spans_are_captured(models: Merger, tokens: int, span: int) -> None:
    assert GraphedSteps(models, lambda: capture, ENOUGH).span(tokens) == span


@pytest.mark.parametrize("make", [graphed, lambda models: DecodeBatch(models, 64, ENOUGH)])
def test_rows_of_too_few_candidates_draw_again(
    make: Callable[[Merger], DecodeBatch], models: Merger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.engines.builtin.sampler.CANDIDATES", 8)
    batch = make(models)
    batch.is_bounded = True
    seen = watch(batch, lambda: batch.steps.bounded)
    work = [[call(counts=[3, 2], new=12, top_p=0.9, top_k=k) for k in (0, 5)] for _ in range(2)]
    assert same(finish(batch, *work[0]), finish(DecodeBatch(models, 64, ENOUGH), *work[1]))
    assert {*seen} == {True, False}


def test_copies_of_adapters_have_few_bytes(models: Merger) -> None:
    held = version(models.base, 1)
    assert held.lora is not None
    for most, kept in ((ENOUGH, [1, 2]), (0, [2])):
        stepper = GraphedSteps(models, lambda: capture, most)
        stepper.bind([held.lora])
        stepper.bind([held.lora, None])
        assert [adapters for adapters, _, _ in stepper.banks] == kept
    pairs = held.lora.pairs.values()
    assert next(iter(stepper.banks.values())).nbytes == 2 * sum(a.nbytes + b.nbytes for a, b in pairs)
