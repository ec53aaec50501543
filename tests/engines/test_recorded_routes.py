"""Routes that the builtin engine records: those of one pass over each whole sample."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lorad.engines.builtin.calls import Call, HeldLora
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.prefix import BLOCK, PrefixCache
from lorad.engines.builtin.steps import GraphedSteps, StepShape
from lorad.models import experts, lora
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.decoder import hidden
from lorad.models.directory import linear_shapes
from lorad.models.experts import Recording, route_shape
from lorad.models.kv import bytes_per_token
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from lorad.models.merge import Merger
from lorad.protocol.batch import Chunk, Chunks, Prompt, Sampling
from lorad.routes import is_unknown
from tests.conformance.engine_suite import whole
from tests.conformance.trainer_experts import write_mixture
from tests.engines.test_captured_steps import capture
from tests.engines.test_decode_batch import ENOUGH, NEVER, finish, same, version
from tests.engines.test_decode_batch import call as unrouted
from tests.kit.fakes.random_adapters import random_adapter

LONG = [4 + n % 60 for n in range(BLOCK + 9)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Merger:
    directory = write_mixture(tmp_path_factory.mktemp("moe"), max_position_embeddings=2048)
    return Merger(load_base(directory, torch.float32, torch.device("cpu")))


def asked(held: HeldLora, counts: Sequence[int], start: Sequence[int], new: int = 40) -> Call:
    prompts = [
        Prompt(
            str(n), np.array([*start, 4 + n], np.int32), np.arange(50 * n, 50 * n + count, dtype=np.uint64)
        )
        for n, count in enumerate(counts)
    ]
    return Call("r", held, prompts, Sampling(new, temperature=2.0, routes=True), None)


@torch.no_grad()
def routes_of(base: Base, held: HeldLora, tokens: Sequence[int]) -> np.ndarray:
    shape = route_shape(base)
    assert shape is not None
    recording, ids = Recording(shape), torch.tensor(tokens)
    hidden(base, ids[None], torch.arange(len(ids)), CausalAttention(), held.lora, routing=recording)
    return recording.routes()


def chunks_of(batch: DecodeBatch, *calls: Call) -> dict[tuple[Call, str, int], Chunk]:
    for joining in calls:
        batch.join(joining)
    reports = []
    while batch.calls:
        reports += batch.run(60)
    of_call = {
        asking: [chunk for by, chunks, _ in reports if by is asking for chunk in chunks] for asking in calls
    }
    return {
        (asking, *key): chunk for asking, chunks in of_call.items() for key, chunk in whole(chunks).items()
    }


def assert_whole(models: Merger, found: dict[tuple[Call, str, int], Chunk]) -> None:
    assert found
    for (asking, prompt, index), chunk in found.items():
        start = asking.groups[int(prompt)].tokens.tolist()
        assert chunk.routes is not None
        expected = routes_of(models.base, asking.held, [*start, *chunk.tokens.tolist()][:-1])
        expected = expected[len(start) * (index > 0) :]
        assert np.array_equal(chunk.routes[:-1], expected)
        assert is_unknown(chunk.routes).tolist() == [False] * len(expected) + [True]


def test_versions_in_one_batch_each_have_theirs(models: Merger) -> None:
    helds = [version(models.base, 1), version(models.base, 2), NEVER]
    calls = [asked(held, [2, 1], [5, 9, 7]) for held in helds]
    assert_whole(models, chunks_of(DecodeBatch(models, 64, ENOUGH), *calls))


def test_cached_prefixes_keep_their_routes(models: Merger) -> None:
    batch, held = DecodeBatch(models, 64, ENOUGH, PrefixCache(ENOUGH)), version(models.base, 1)
    finish(
        batch,
        Call("r", held, [Prompt("0", np.array(LONG, np.int32), np.zeros(1, np.uint64))], Sampling(2), None),
    )
    calls = [asked(held, [2, 1], LONG), asked(held, [1], LONG)]
    before = calls[0].caller.cached
    assert_whole(models, chunks_of(batch, *calls))
    assert calls[0].caller.cached > before


@pytest.mark.system
def test_samples_that_lost_their_place_keep_them(models: Merger) -> None:
    small, call = (
        DecodeBatch(models, 64, 300 * bytes_per_token(models.base)),
        asked(NEVER, [4, 4], [5, 9], 120),
    )
    assert_whole(models, chunks_of(small, call))
    assert small.preempted


def test_routes_travel_with_their_chunks(models: Merger) -> None:
    call = asked(NEVER, [2, 1], [5, 9, 7])
    chunks = list(chunks_of(DecodeBatch(models, 64, ENOUGH), call).values())
    prompts = [Prompt(str(n), np.zeros(1, np.int32), np.zeros(2, np.uint64)) for n in range(2)]
    there = [one.routes for one in Chunks.of("v", chunks, {"0": 0, "1": 1}).split(prompts)]
    assert len(there) == 3
    for chunk, routes in zip(chunks, there, strict=True):
        assert chunk.routes is not None and routes is not None
        assert np.array_equal(chunk.routes, routes)


def attending(base: Base) -> HeldLora:
    """A version whose adapters are on attention alone."""
    shapes = {name: shape for name, shape in linear_shapes(base.config).items() if "self_attn" in name}
    adapter = random_adapter(shapes, 3, 4)
    return HeldLora("run@3", adapter.digest(), FrozenLora(base, adapter.tensors, adapter.config.scale))


@pytest.fixture
def graphed(models: Merger, monkeypatch: pytest.MonkeyPatch) -> DecodeBatch:
    """A batch with captured steps, and a product of experts that asks no device for sizes, as a GPU has."""

    def product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        mine = (rows >= begins[:, None]) & (rows < ends[:, None])
        return torch.einsum("er,eoi,ri->ro", mine.to(x.dtype), weights, x)

    monkeypatch.setattr(experts, "grouped", product)
    monkeypatch.setattr(lora, "grouped", product)
    batch = DecodeBatch(models, 64, ENOUGH)
    batch.stepper = GraphedSteps(models, lambda: capture, ENOUGH)
    return batch


def graphs_of(batch: DecodeBatch) -> list[tuple[StepShape, object]]:
    assert isinstance(batch.stepper, GraphedSteps)
    return [*batch.stepper.graphs]


@pytest.mark.system
def test_captured_steps_note_experts_of_each_token(models: Merger, graphed: DecodeBatch) -> None:
    batch = graphed
    held = attending(models.base)
    assert_whole(models, chunks_of(batch, *(asked(each, [3, 2], [5, 9, 7], 10) for each in (held, NEVER))))
    assert {shape.routed for shape, _ in graphs_of(batch)} == {True}
    captured = len(graphs_of(batch))
    assert same(*(finish(each, unrouted(held, new=6)) for each in (batch, DecodeBatch(models, 64, ENOUGH))))
    assert len(graphs_of(batch)) > captured  # steps that note nothing are others


@pytest.mark.system
def test_captured_steps_read_adapters_on_experts(models: Merger, graphed: DecodeBatch) -> None:
    """One that is alone is read itself; of several there are copies."""
    helds = [version(models.base, 1, rank=2), version(models.base, 2, rank=6)]
    for mine in ([NEVER, *helds], helds, [helds[0]], [helds[1]], [helds[0]]):
        work = [[unrouted(held, [3, 2], new=4) for held in mine] for _ in range(2)]
        assert same(finish(graphed, *work[0]), finish(DecodeBatch(models, 64, ENOUGH), *work[1]))
    alone = [held.lora.number for held in helds if held.lora is not None]
    reads = [reads for _, reads in graphs_of(graphed)]
    assert {*alone} < {*reads} and reads.count(alone[0]) < len(reads) // 2
    graphed.stepper.forget(helds[0].lora)
    assert {reads for _, reads in graphs_of(graphed)} == {*reads} - {alone[0]}


def test_copies_of_adapted_experts_go_with_their_rows(models: Merger) -> None:
    helds = [version(models.base, seed).lora for seed in (1, 2)]
    for most, kept in ((ENOUGH, 1), (0, 0)):
        stepper = GraphedSteps(models, lambda: capture, most)
        stepper.bind(helds)
        assert len(stepper.banks) == 1
        stepper.bind([])
        assert len(stepper.banks) == kept
