"""A decode batch that runs share with everybody who is served: who comes first, who pays,
what is seen of it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import torch

from lorad.engines.base import AdapterSource
from lorad.engines.builtin.calls import Call, HeldLora
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.engine import BuiltinEngine, SharedDecode
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes
from lorad.models.kv import bytes_per_token
from lorad.models.loading import load_base
from lorad.models.merge import Merger
from lorad.models.turns import WORK, Caller, Party
from lorad.protocol.batch import Prompt, Sampling
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.pool_kit import TINY

ENOUGH = 1 << 30
BASE = HeldLora("base", "base", None)


@pytest.fixture(scope="module")
def models() -> Merger:
    return Merger(load_base(TINY, torch.float32, torch.device("cpu")))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(n), np.array([5, 9, 4 + n], np.int32), np.array([n], np.uint64)) for n in range(count)]


def call(party: Party, count: int, new: int = 12) -> Call:
    return Call("r", BASE, prompts(count), Sampling(new), None, Caller(party))


def rows_of(batch: DecodeBatch, party: Party) -> int:
    return sum(group.call.caller.party is party for group in batch.groups)


def watched(batch: DecodeBatch, party: Party, calls: Sequence[Call]) -> list[int]:
    """Rows of the party after each step, as long as others wait."""
    for one in calls:
        batch.join(one)
    rows: list[int] = []
    while batch.calls:
        batch.run(0)
        if batch.pending.others and batch.samples:
            rows.append(rows_of(batch, party))
    return rows


def test_late_served_call_gets_its_rows(models: Merger) -> None:
    run, serve = Party("run"), Party("serve", goes_first=True)
    rows = watched(DecodeBatch(models, 16, ENOUGH), serve, [call(run, 60), call(serve, 60)])
    assert rows[0] == 4 and max(rows) == 4  # a quarter of 16


def test_who_is_served_alone_has_all_rows(models: Merger) -> None:
    batch, serve = DecodeBatch(models, 16, ENOUGH), Party("serve", goes_first=True)
    batch.join(call(serve, 60))
    batch.run(0)
    batch.run(0)
    assert len(batch.samples) == 16


def test_served_calls_wait_for_no_run(models: Merger) -> None:
    batch, run, serve = DecodeBatch(models, 64, ENOUGH), Party("run"), Party("serve", goes_first=True)
    batch.join(call(run, 60, new=200))
    batch.run(0)
    batch.join(call(serve, 1, new=3))
    batch.run(0)
    assert rows_of(batch, serve) == 1


def test_batch_charges_by_rows_and_counts_waits(models: Merger) -> None:
    batch, one, two, late = DecodeBatch(models, 8, ENOUGH), Party("one", 2.0), Party("two"), Party("late")
    shared = SharedDecode(batch)
    for each in (call(one, 2), call(two, 6), call(late, 6)):
        batch.join(each)
    batch.run(0)
    shared.ran(3.0)
    assert dict(shared.parts()) == {shared: 1.0, one: 2 / 8 - 2 / 4, two: 6 / 8 - 1 / 4, late: -1 / 4}
    shared.wait(1.0)
    assert (one.waited, two.waited, late.waited) == (1.0, 1.0, 4.0)


@pytest.fixture
async def engine() -> AsyncIterator[BuiltinEngine]:
    compute = Compute()
    base = load_base(TINY, torch.float32, torch.device("cpu"))
    made = BuiltinEngine(base, compute, TINY, mix_calls=True, max_rows=8)
    for number in range(3):
        adapter = random_adapter(linear_shapes(base.config), number, 4)
        await made.load(f"run@{number}", AdapterSource(adapter.digest(), adapter=adapter))
    yield made
    await made.close()
    compute.close()


async def generate(engine: BuiltinEngine, caller: Caller, version: str, new: int) -> int:
    WORK.set(caller)
    chunks = [chunk async for chunk in engine.generate(version, version, prompts(2), Sampling(new))]
    return sum(chunk.tokens.size for chunk in chunks)


async def test_health_has_the_adapters_per_step(engine: BuiltinEngine) -> None:
    assert (await engine.health()).adapters_per_step is None
    callers = [Caller(Party(str(number))) for number in range(4)]
    versions = ["run@0", "run@1", "run@2", "base"]
    asked = [generate(engine, caller, name, 40) for caller, name in zip(callers, versions, strict=True)]
    assert await asyncio.gather(*asked) == [80] * 4
    assert (await engine.health()).adapters_per_step == 3.0


@pytest.mark.system
async def test_served_call_waits_for_no_runs_memory() -> None:
    compute, base = Compute(), load_base(TINY, torch.float32, torch.device("cpu"))
    engine = BuiltinEngine(base, compute, TINY, mix_calls=False, cache_bytes=40 * bytes_per_token(base))
    run = asyncio.create_task(generate(engine, Caller(Party("run")), "base", 400))
    while not engine._tasks:  # noqa: ASYNC110 (its call has begun, and has all memory)
        await asyncio.sleep(0)
    assert await generate(engine, Caller(Party("serve", goes_first=True)), "base", 2) == 4
    assert not run.done() and await run == 800
    await engine.close()
    compute.close()


async def test_waits_for_rows_are_measured(engine: BuiltinEngine) -> None:
    first, second = Caller(Party("first")), Caller(Party("second"))
    many = [generate(engine, first, "run@0", 60) for _ in range(4)]
    await asyncio.gather(*many, generate(engine, second, "run@1", 1))
    assert second.waited > 0 and second.party.waited == second.waited
