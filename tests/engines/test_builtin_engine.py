"""What only the builtin engine promises: bit-equal repeats, batches that fill and drain, a budget that calls
share.
"""

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from lorad.adapters.peft import write_peft
from lorad.engines.base import BASE, AdapterSource
from lorad.engines.builtin import calls
from lorad.engines.builtin.calls import HeldLora
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.errors import NotFound
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes, resolve
from lorad.models.kv import KVCache, bytes_per_token
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, Sampling
from tests.conformance.engine_suite import CANARY, LONG, SHORT, complete, prompt
from tests.kit.fakes.random_adapters import random_adapter

TINY = resolve("builtin:tiny")


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


async def test_concurrent_calls_change_no_bit(engine: BuiltinEngine, base: Base) -> None:
    await load(engine, base, "run@1")
    work = [prompt(seeds=range(5)), prompt("q", [4, 4, 8], [7, 8])]
    sampling = Sampling(max_new_tokens=40, stop_token_ids=(1,))
    first = await complete(engine, "run@1", work, sampling)
    other = asyncio.create_task(complete(engine, BASE, [prompt(seeds=range(9))], LONG))
    assert await complete(engine, "run@1", work, sampling) == first
    await other


@pytest.mark.system
async def test_samples_waiting_for_rows_stay_the_same(base: Base, compute: Compute) -> None:
    work = [prompt(f"p{n}", [5, 9, 4 + n], range(10 * n, 10 * n + 3)) for n in range(8)]
    sampling = Sampling(max_new_tokens=30, temperature=2.0, stop_token_ids=tuple(range(3, 20)))
    wide, narrow = BuiltinEngine(base, compute, TINY), BuiltinEngine(base, compute, TINY, max_rows=4)
    made = await complete(wide, BASE, work, sampling), await complete(narrow, BASE, work, sampling)
    assert len({len(tokens) for tokens, _, _ in made[0].values()}) > 5
    assert {key: sample[0] for key, sample in made[0].items()} == {
        key: sample[0] for key, sample in made[1].items()
    }


@pytest.mark.system
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


async def test_stop_string_ends_a_sample_when_complete(engine: BuiltinEngine) -> None:
    free = (await complete(engine, BASE, [prompt(seeds=[4])], SHORT))["p", 0][0]
    text = Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(free[2:4], skip_special_tokens=False)
    sampling = Sampling(max_new_tokens=8, stop=("never there", text))
    tokens, _, finish = (await complete(engine, BASE, [prompt(seeds=[4])], sampling))["p", 0]
    assert (tokens, finish) == (free[:4], "stop")


async def test_engine_serves_a_copy_of_the_tensors(engine: BuiltinEngine, base: Base) -> None:
    adapter = random_adapter(linear_shapes(base.config), 1)
    await engine.load("run@1", AdapterSource(adapter.digest(), adapter=adapter))
    before = await engine.score("run@1", CANARY)
    for tensor in adapter.tensors.values():
        tensor += 1.0
    assert (await engine.score("run@1", CANARY) == before).all()


async def test_a_directory_serves_what_memory_serves(
    engine: BuiltinEngine, base: Base, tmp_path: Path
) -> None:
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


async def test_a_version_is_made_while_others_compute(
    engine: BuiltinEngine, base: Base, compute: Compute
) -> None:
    reached, go = threading.Event(), threading.Event()

    def busy() -> None:
        reached.set()
        go.wait(60)

    task = asyncio.create_task(compute.run(busy))
    try:
        await asyncio.to_thread(reached.wait, 30)
        async with asyncio.timeout(30):
            await load(engine, base, "run@1")
        assert "run@1" in engine._versions.table and not task.done()
    finally:
        go.set()
        await task


async def test_an_unloaded_version_is_freed_at_once(
    engine: BuiltinEngine, base: Base, compute: Compute
) -> None:
    await load(engine, base, "run@1")
    lora = weakref.ref(engine._versions.table["run@1"].lora)
    gc.disable()
    try:
        await complete(engine, "run@1", [prompt(seeds=range(4))], SHORT)
        await engine.unload("run@1")
        await compute.run(int)  # the thread has left the quantum before
        assert lora() is None
    finally:
        gc.enable()


async def test_failed_quantum_ends_only_its_calls(engine: BuiltinEngine, base: Base) -> None:
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
async def test_prompts_that_the_model_cannot_read_are_refused(
    engine: BuiltinEngine, tokens: list[int]
) -> None:
    with pytest.raises(ValueError, match="prompt p"):
        await complete(engine, BASE, [prompt("p", tokens)], SHORT)


async def test_a_call_without_samples_ends_at_once(engine: BuiltinEngine) -> None:
    assert await complete(engine, BASE, [prompt(seeds=[])], SHORT) == {}


async def test_leaving_version_takes_no_new_calls(engine: BuiltinEngine, base: Base) -> None:
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


@pytest.mark.system(but="1.0")
@pytest.mark.parametrize("seconds", [calls.GATHER_SECONDS, 0.0])
async def test_unstreamed_samples_are_the_streamed_ones(
    engine: BuiltinEngine, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(calls, "GATHER_SECONDS", seconds)
    prompts = [prompt(seeds=range(4))]
    whole = msgspec.structs.replace(LONG, stream=False)
    assert await complete(engine, BASE, prompts, whole) == await complete(engine, BASE, prompts, LONG)


@pytest.mark.parametrize("stream", [True, False])
async def test_only_streams_report_each_sample_at_once(stream: bool) -> None:
    held = HeldLora("run@1", "", None)
    call = calls.Call("r", held, [prompt(seeds=range(2))], Sampling(max_new_tokens=1, stream=stream), None)
    assert call.report(time.monotonic()) in (None, [])
    call.samples[0].push(5, -1.0)
    first = call.report(time.monotonic())
    assert (first is not None) == stream
    call.samples[1].push(6, -2.0)
    last = call.report(time.monotonic())
    assert last is not None and len([*(first or []), *last]) == 2 and call.ended
    assert call.more() == 2


async def test_an_unstreamed_call_reports_each_second() -> None:
    held = HeldLora("run@1", "", None)
    call = calls.Call("r", held, [prompt(seeds=range(2))], Sampling(max_new_tokens=9, stream=False), None)
    call.samples[0].push(5, -1.0)
    assert call.report(call.reported + calls.GATHER_SECONDS / 2) is None
    (chunk,) = call.report(call.reported + calls.GATHER_SECONDS) or []
    assert (chunk.index, chunk.tokens.tolist(), chunk.finish) == (0, [5], None)


async def test_unstreamed_samples_are_counted_and_aborted(engine: BuiltinEngine) -> None:
    whole = msgspec.structs.replace(LONG, stream=False)

    async def finishes() -> list[str | None]:
        return [chunk.finish async for chunk in engine.generate("r", BASE, [prompt(seeds=range(4))], whole)]

    task = asyncio.create_task(finishes())
    async with asyncio.timeout(60):
        while not (await engine.health()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await engine.abort("r")
    assert await task == ["abort"] * 4
    assert (await engine.health()).tokens_per_second > 0


async def test_call_joining_a_failing_batch_is_served(
    base: Base, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BuiltinEngine(base, compute, TINY, mix_calls=True)
    reached, go, steps = threading.Event(), threading.Event(), itertools.count()
    step = DecodeBatch._step

    def fails_once(batch: DecodeBatch) -> None:
        if next(steps) == 2:
            reached.set()
            go.wait(30)
            raise MemoryError("no memory")
        step(batch)

    monkeypatch.setattr(DecodeBatch, "_step", fails_once)
    first = asyncio.create_task(complete(engine, BASE, [prompt()], SHORT))
    await asyncio.to_thread(reached.wait)
    second = asyncio.create_task(complete(engine, BASE, [prompt()], SHORT))
    await asyncio.sleep(0)  # it waits to join the batch
    go.set()
    with pytest.raises(MemoryError):
        await first
    assert len(await second) == 1


@pytest.mark.system
async def test_separate_batches_share_one_cache_budget(base: Base, compute: Compute) -> None:
    engine = BuiltinEngine(base, compute, TINY, cache_bytes=225 * bytes_per_token(base), mix_calls=False)
    sampling = msgspec.structs.replace(LONG, max_new_tokens=100)
    held: list[int] = []
    resize = KVCache.resize

    def watched(cache: KVCache, slots: int, length: int, used: int) -> None:
        resize(cache, slots, length, used)
        # the engine changes its tasks meanwhile, on another thread
        held.append(sum(batch.cache.slots * batch.cache.length for batch in list(engine._tasks)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "resize", watched)
        calls = (complete(engine, BASE, [prompt(seeds=[1, 2])], sampling, request=str(n)) for n in range(4))
        made = await asyncio.gather(*calls)
    assert 150 < max(held) <= 225 and all(one == made[0] for one in made)
    await engine.close()


@pytest.mark.parametrize(
    "sampling", [Sampling(4, temperature=float("nan")), Sampling(4, stop=("",)), Sampling(0)]
)
async def test_sampling_that_means_nothing_is_refused(engine: BuiltinEngine, sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"temperature|stop"):
        await complete(engine, BASE, [prompt()], sampling)
