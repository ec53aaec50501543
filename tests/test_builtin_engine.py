"""What only the builtin engine promises: bit-equal repeats, its sampler's distribution, batches that fill and drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from lorad.adapters.peft import write_peft
from lorad.engines.base import BASE, AdapterSource
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.engines.builtin.sampler import Steps, draw, keys_of, mix, parameters_of, sample, uniforms
from lorad.errors import NotFound
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes, resolve
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, Sampling
from tests.conformance.engine_suite import CANARY, LONG, SHORT, complete, prompt, random_adapter

TINY = resolve("builtin:tiny")
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(TINY, torch.float32, torch.device("cpu"))


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    compute = Compute()
    yield compute
    compute.close()


@pytest.fixture
async def engine(base: Base, compute: Compute) -> AsyncIterator[BuiltinEngine]:
    engine = BuiltinEngine(base, compute, TINY)
    yield engine
    await engine.close()


async def load(engine: BuiltinEngine, base: Base, name: str, seed: int = 1) -> None:
    adapter = random_adapter(linear_shapes(base.config), seed)
    await engine.load(name, AdapterSource(adapter.digest(), adapter=adapter))


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_mix_is_splitmix64() -> None:
    values = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    mixed = mix(torch.from_numpy(np.array(values, np.uint64).view(np.int64)))
    assert mixed.numpy().view(np.uint64).tolist() == [splitmix64(value) for value in values]
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output of the published generator, seed 0


def test_uniforms_are_even_and_uncorrelated_along_seeds_and_positions() -> None:
    keys = mix(torch.arange(400))
    grid = uniforms(keys[:, None], torch.arange(50)[None, :])
    assert grid.min() >= 0 and grid.max() < 1
    counts = torch.histc(grid.float(), 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p < 0.001
    for axis in (0, 1):
        shifted = torch.roll(grid, 1, axis)
        assert abs(float(((grid - 0.5) * (shifted - 0.5)).mean())) * 12 < 0.03


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0, 0.0]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities, uniform).tolist() == [1, 3, 3, 3]


def draws(logits: torch.Tensor, sampling: Sampling, count: int = 20000) -> tuple[torch.Tensor, torch.Tensor]:
    """(frequency, logprob) of each token; frequencies from `count` seeds."""
    keys, counts = keys_of(np.arange(count, dtype=np.uint64)), torch.zeros(count, dtype=torch.int64)
    steps, parameters = Steps.of([sampling]), parameters_of([sampling] * count)
    tokens, logprobs = sample(logits.expand(count, -1), keys, counts, parameters, steps)
    known = torch.full_like(logits, float("nan")).index_put((tokens,), logprobs)
    return torch.bincount(tokens, minlength=len(logits)) / count, known


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1), [0, 1, 2, 3, 4]),
        (Sampling(1, temperature=0.5), [0, 1, 2, 3, 4]),
        (Sampling(1, top_k=2), [0, 4]),
        (Sampling(1, top_p=0.6), [0, 4]),
        (Sampling(1, top_k=3, top_p=0.9), [0, 1, 4]),
        (Sampling(1, top_k=2, top_p=0.55), [0]),  # 0.46 of all mass, but 0.62 of what top_k leaves
        (Sampling(1, top_p=1e-6), [0]),
        (Sampling(1, temperature=0.0), [0]),
    ],
    ids=["plain", "cold", "top-k", "top-p", "top-k-then-top-p", "top-p-of-top-k", "tiny-top-p", "greedy"],
)
def test_tokens_follow_the_distribution_that_was_asked_for(sampling: Sampling, kept: list[int]) -> None:
    scaled = torch.log_softmax(LOGITS / (sampling.temperature or 1.0), -1)
    expected = torch.zeros(5).index_put((torch.tensor(kept),), scaled[kept].exp())
    frequency, logprobs = draws(LOGITS, sampling)
    assert (frequency - expected / expected.sum()).abs().max() < 0.012
    assert set(frequency.nonzero()[:, 0].tolist()) == set(kept)
    assert (logprobs[kept] - scaled[kept]).abs().max() < 1e-6  # before truncation


async def test_the_same_call_gives_the_same_bits_whatever_else_runs(engine: BuiltinEngine, base: Base) -> None:
    await load(engine, base, "run@1")
    work = [prompt(seeds=range(5)), prompt("q", [4, 4, 8], [7, 8])]
    sampling = Sampling(max_new_tokens=40, stop_token_ids=(1,))
    first = await complete(engine, "run@1", work, sampling)
    other = asyncio.create_task(complete(engine, BASE, [prompt(seeds=range(9))], LONG))
    assert await complete(engine, "run@1", work, sampling) == first
    await other


async def test_more_samples_than_rows_wait_for_room_and_come_out_the_same(base: Base, compute: Compute) -> None:
    work = [prompt(f"p{n}", [5, 9, 4 + n], range(10 * n, 10 * n + 3)) for n in range(8)]
    sampling = Sampling(max_new_tokens=30, temperature=2.0, stop_token_ids=tuple(range(3, 20)))
    wide, narrow = BuiltinEngine(base, compute, TINY), BuiltinEngine(base, compute, TINY, max_rows=4)
    made = await complete(wide, BASE, work, sampling), await complete(narrow, BASE, work, sampling)
    assert len({len(tokens) for tokens, _, _ in made[0].values()}) > 5
    assert {key: sample[0] for key, sample in made[0].items()} == {key: sample[0] for key, sample in made[1].items()}


async def test_a_long_sample_outgrows_its_first_cache(engine: BuiltinEngine) -> None:
    made = (await complete(engine, BASE, [prompt(seeds=[1, 2])], Sampling(max_new_tokens=300)))["p", 1]
    scores = await engine.score(BASE, Batch.of([(prompt().tokens, [np.array(made[0], np.int32)])]))
    assert np.abs(scores - np.array(made[1], np.float32)).max() < 1e-4


async def test_scores_equal_transformers(engine: BuiltinEngine) -> None:
    model = Qwen3ForCausalLM.from_pretrained(TINY).eval()
    expected = []
    for start, completions in CANARY.groups():
        for completion in completions:
            ids = torch.from_numpy(np.concatenate([start, completion]).astype(np.int64))
            with torch.no_grad():
                logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)
            expected += logprobs[len(start) - 1 : -1].gather(1, ids[len(start) :, None])[:, 0].tolist()
    assert np.abs(await engine.score(BASE, CANARY) - np.array(expected)).max() < 1e-4


async def test_a_stop_string_ends_a_sample_at_the_token_that_completes_it(engine: BuiltinEngine) -> None:
    free = (await complete(engine, BASE, [prompt(seeds=[4])], SHORT))["p", 0][0]
    text = Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(free[2:4], skip_special_tokens=False)
    sampling = Sampling(max_new_tokens=8, stop=("never there", text))
    tokens, _, finish = (await complete(engine, BASE, [prompt(seeds=[4])], sampling))["p", 0]
    assert (tokens, finish) == (free[:4], "stop")


async def test_what_is_served_is_a_copy_that_later_steps_do_not_reach(engine: BuiltinEngine, base: Base) -> None:
    adapter = random_adapter(linear_shapes(base.config), 1)
    await engine.load("run@1", AdapterSource(adapter.digest(), adapter=adapter))
    before = await engine.score("run@1", CANARY)
    for tensor in adapter.tensors.values():
        tensor += 1.0
    assert (await engine.score("run@1", CANARY) == before).all()


async def test_a_directory_serves_what_memory_serves(engine: BuiltinEngine, base: Base, tmp_path: Path) -> None:
    adapter = random_adapter(linear_shapes(base.config), 1)
    write_peft(adapter, tmp_path, "builtin:tiny")
    await engine.load("memory@1", AdapterSource(adapter.digest(), adapter=adapter))
    await engine.load("files@1", AdapterSource(adapter.digest(), directory=tmp_path))
    assert (await engine.score("memory@1", CANARY) == await engine.score("files@1", CANARY)).all()


async def test_a_caller_that_walks_away_holds_nothing(engine: BuiltinEngine, base: Base) -> None:
    await load(engine, base, "run@1")
    stream = engine.generate("r", "run@1", [prompt(seeds=range(4))], LONG)
    await anext(stream)
    assert [version.in_flight for version in await engine.loaded()] == [1]
    await stream.aclose()  # type: ignore[attr-defined]
    await engine.unload("run@1")
    assert (await engine.health()).running == 0


async def test_a_failed_quantum_ends_its_calls_and_nothing_else(engine: BuiltinEngine, base: Base) -> None:
    await load(engine, base, "run@1")
    lora = engine._versions.table["run@1"].lora
    assert lora is not None
    lora.pairs[0, "qkv"] = lora.pairs[0, "down"]
    with pytest.raises(RuntimeError, match="size"):
        await complete(engine, "run@1", [prompt()], SHORT)
    await engine.unload("run@1")
    assert len(await complete(engine, BASE, [prompt()], SHORT)) == 1


async def test_the_base_is_untouched_and_bfloat16_is_served(base: Base, compute: Compute) -> None:
    before = base.checksum()
    half = load_base(TINY, torch.bfloat16, torch.device("cpu"))
    engines = [BuiltinEngine(model, compute, TINY) for model in (base, half)]
    for engine, model in zip(engines, (base, half), strict=True):
        await load(engine, model, "run@1")
        assert len(await complete(engine, "run@1", [prompt(seeds=range(4))], SHORT)) == 4
    full, rough = [await engine.score(BASE, CANARY) for engine in engines]
    assert 0 < np.abs(full - rough).max() < 0.2
    assert engines[1].capabilities().dtype == "bfloat16"
    assert base.checksum() == before


@pytest.mark.parametrize("tokens", [[], [-1], [5, 1000]])
async def test_prompts_that_the_model_cannot_read_are_refused(engine: BuiltinEngine, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="prompt p"):
        await complete(engine, BASE, [prompt("p", tokens)], SHORT)


async def test_a_call_without_samples_ends_at_once(engine: BuiltinEngine) -> None:
    assert await complete(engine, BASE, [prompt(seeds=[])], SHORT) == {}


async def test_a_version_that_is_leaving_takes_no_new_calls(engine: BuiltinEngine, base: Base) -> None:
    await load(engine, base, "run@1")
    stream = engine.generate("r", "run@1", [prompt()], LONG)
    await anext(stream)
    leaving = asyncio.create_task(engine.unload("run@1"))
    await asyncio.sleep(0)
    with pytest.raises(NotFound):
        await complete(engine, "run@1", [prompt()], SHORT)
    await engine.abort("r")
    assert [chunk.finish async for chunk in stream][-1] == "abort"
    await leaving
