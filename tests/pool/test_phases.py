"""Mode timesliced: the engine sleeps while the trainer trains, and neither waits for nothing."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from lorad.errors import Conflict, PoolLost, SpecError
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.pool import phases
from lorad.pool.phases import Phases
from lorad.protocol import frames
from lorad.protocol.batch import Chunk, Sampling
from lorad.protocol.calls import Call, Generate, Nothing
from lorad.protocol.connection import Connection
from tests.kit.fakes.sleeping_engines import Sleeps
from tests.kit.pool_kit import (
    DEADLINE,
    OPEN,
    TINY,
    Running,
    generate,
    learn,
    prompts,
    publish,
    running_pool,
    texts,
    until,
)

SLEEPS = "tests.kit.fakes.sleeping_engines:Sleeps"
ALONE = {
    "mode": "timesliced",
    "engine_class": SLEEPS,
    "trainer_class": "tests.kit.fakes.sleeping_engines:TrainsAlone",
}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Running]:
    with running_pool(tmp_path, **ALONE) as running:
        yield running


@pytest.fixture
def run(pool: Running) -> Iterator[Connection]:
    with pool.connect("sorter") as connection:
        connection.call("open", OPEN)
        yield connection


def changes() -> list[str]:
    return Sleeps.newest.changes


def test_engine_sleeps_only_while_the_trainer_trains(run: Connection, tmp_path: Path) -> None:
    for number in range(3):
        publish(run, tmp_path, number)
        assert texts(generate(run, f"sorter@{number}"))
        assert changes() == ["sleep", "wake"] * number
        learn(run, seed=number)
    assert publish(run, tmp_path, 3).attestation.verdict == "passed"


def test_verbs_of_the_same_kind_change_nothing(run: Connection) -> None:
    for seed in range(3):
        learn(run, seed)
    assert changes() == ["sleep"] and run.call("status", Nothing()).engine.asleep


def test_only_new_canaries_wake_the_engine(run: Connection, pool: Running) -> None:
    learn(run)
    with pool.connect("same") as same, pool.connect("other") as other:
        same.call("open", OPEN)
        assert changes() == ["sleep"]
        other.call("open", msgspec.structs.replace(OPEN, canaries=4))
    assert changes() == ["sleep", "wake"]


def test_a_pool_ends_without_waking_its_engine(tmp_path: Path) -> None:
    with running_pool(tmp_path, **ALONE) as running, running.connect("sorter") as connection:
        connection.call("open", OPEN)
        publish(connection, tmp_path, 0)
        learn(connection)
        connection.call("close", Nothing())
    assert changes() == ["sleep"]


@pytest.mark.system
def test_slow_reader_delays_no_trainer(run: Connection, pool: Running) -> None:
    with pool.connect() as slow:
        chunks = slow.stream("serve", Generate("base", prompts(16, 4), Sampling(max_new_tokens=60)))
        next(chunks)
        assert learn(run).applied
        *_, result = chunks
    assert result.samples == 64


def test_streams_that_are_given_up_leave_nothing_behind(run: Connection, pool: Running) -> None:
    waiting = pool.pool.phases._waiting
    long = Generate("base", prompts(), Sampling(max_new_tokens=2000))
    with pool.connect() as streaming, pool.connect() as late:
        next(streaming.stream("serve", long))
        training = threading.Thread(target=learn, args=(run,))
        training.start()
        until(lambda: len(waiting["training"]) == 1)
        for part in frames.encode(Call(1, "serve", long)):
            late._socket.sendall(part)
        until(lambda: len(waiting["serving"]) == 1)
    training.join(DEADLINE)
    until(lambda: pool.pool.phases._inside == 0 and waiting == {"training": [], "serving": []})
    assert changes() == ["sleep"]


@pytest.mark.system
def test_runs_in_a_timesliced_pool_learn_as_alone(tmp_path: Path) -> None:
    digests: dict[str, list[str]] = {}

    def train(running: Running, name: str, seed: int) -> None:
        with running.connect(name) as connection:
            connection.call("open", msgspec.structs.replace(OPEN, seed=seed))
            for step in range(3):
                version = publish(connection, tmp_path, step)
                digests.setdefault(name, []).append(version.sha256)
                generate(connection, version.version)
                learn(connection, seed=10 * seed + step)

    with running_pool(tmp_path) as fused:
        train(fused, "alone-1", 1)
        train(fused, "alone-2", 2)
    with running_pool(tmp_path, **ALONE) as shared:
        threads = [threading.Thread(target=train, args=(shared, f"together-{i}", i)) for i in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    assert (digests["together-1"], digests["together-2"]) == (digests["alone-1"], digests["alone-2"])


def test_an_engine_that_cannot_sleep_is_refused(tmp_path: Path) -> None:
    unable = {"engine_class": "lorad.engines.builtin.engine:BuiltinEngine", "mode": "timesliced"}
    with pytest.raises(SpecError, match="builtin cannot sleep"), running_pool(tmp_path, **unable):
        pass


@pytest.fixture
async def engine() -> AsyncIterator[Sleeps]:
    compute = Compute()
    made = Sleeps(load_base(TINY, torch.float32, torch.device("cpu")), compute, TINY)
    yield made
    await made.close()
    compute.close()


class Work:
    """Holds a phase until it may end."""

    def __init__(self, phases: Phases, kind: str, run: str = "a") -> None:
        self.is_in, self._may_end = False, asyncio.Event()
        self.task = asyncio.create_task(
            self._hold(phases.training(run) if kind == "training" else phases.serving(run))
        )

    async def _hold(self, phase: contextlib.AbstractAsyncContextManager[None]) -> None:
        async with phase:
            self.is_in = True
            await self._may_end.wait()

    async def end(self) -> None:
        self._may_end.set()
        await self.task


async def settled() -> None:
    """Let everything happen that can happen without anybody's doing."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_waiting_trainer_goes_before_later_calls(engine: Sleeps) -> None:
    shared = Phases(engine, is_timesliced=True)
    first, training, late = Work(shared, "serving"), Work(shared, "training"), Work(shared, "serving")
    await settled()
    assert (first.is_in, training.is_in, late.is_in) == (True, False, False)
    await first.end()
    await settled()
    assert (training.is_in, late.is_in) == (True, False)
    await training.end()
    await late.end()
    assert engine.changes == ["sleep", "wake"]


async def test_trainer_relaxes_before_the_engine_wakes(engine: Sleeps) -> None:
    class Trains:
        async def relax(self) -> None:
            engine.changes.append("relax")

    shared = Phases(engine, is_timesliced=True, trainer=cast("Any", Trains()))
    for kind in ("training", "serving"):
        await Work(shared, kind).end()
    assert engine.changes == ["sleep", "relax", "wake"]


async def test_training_run_is_not_interrupted(engine: Sleeps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "LINGER", 1e6)
    shared = Phases(engine, is_timesliced=True)
    await Work(shared, "training", "a").end()
    other = Work(shared, "serving", "b")
    await Work(shared, "training", "a").end()
    assert (other.is_in, engine.changes) == (False, ["sleep"])
    mine = Work(shared, "serving", "a")
    await asyncio.gather(mine.end(), other.end())
    assert engine.changes == ["sleep", "wake"]


async def test_own_stream_does_not_interrupt_training(
    engine: Sleeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "LINGER", 1e6)
    shared = Phases(engine, is_timesliced=True)
    ahead = cast(
        "AsyncGenerator[Chunk, None]", engine.generate("ahead", "base", prompts(), Sampling(max_new_tokens=2))
    )
    await Work(shared, "training", "a").end()
    sampling = asyncio.create_task(anext(shared.stream("a", ahead)))
    await settled()
    await Work(shared, "training", "a").end()
    assert (sampling.done(), engine.changes) == (False, ["sleep"])
    await Work(shared, "serving", "a").end()
    assert (await sampling).tokens.size and engine.changes == ["sleep", "wake"]


async def test_a_run_that_pauses_is_not_waited_for(engine: Sleeps) -> None:
    shared = Phases(engine, is_timesliced=True)
    await Work(shared, "training", "a").end()
    await Work(shared, "serving", "b").end()
    assert engine.changes == ["sleep", "wake"]


async def test_a_caller_that_is_cancelled_holds_up_nobody(engine: Sleeps) -> None:
    shared = Phases(engine, is_timesliced=True)
    first, training, late = Work(shared, "serving"), Work(shared, "training"), Work(shared, "serving")
    await settled()
    training.task.cancel()
    await settled()
    assert late.is_in
    await asyncio.gather(first.end(), late.end())
    assert engine.changes == []


async def test_caller_cancelled_on_its_turn_delays_nobody(
    engine: Sleeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Phases(engine, is_timesliced=True)
    let_in, training = shared._let_in, Work(shared, "training")

    def let_in_and_cancel(kind: phases.Kind, error: Exception | None = None) -> None:
        let_in(kind, error)
        training.task.cancel()

    monkeypatch.setattr(shared, "_let_in", let_in_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await training.task
    assert not training.is_in
    monkeypatch.undo()
    await Work(shared, "serving").end()
    assert engine.changes == ["sleep", "wake"]


async def test_failed_change_of_phase_is_retried(engine: Sleeps) -> None:
    shared = Phases(engine, is_timesliced=True)
    engine.fails = PoolLost("server 0 does not answer")
    with pytest.raises(PoolLost, match="server 0"):
        await Work(shared, "training").end()
    await Work(shared, "serving").end()
    await Work(shared, "training").end()
    assert engine.changes == ["wake", "sleep"]


async def test_no_more_wait_than_can(engine: Sleeps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MOST_WAITING", 2)
    shared = Phases(engine, is_timesliced=True)
    first, *waiting = Work(shared, "serving"), Work(shared, "training"), Work(shared, "serving")
    await settled()
    with pytest.raises(Conflict, match="2 calls wait"):
        await Work(shared, "serving").end()
    await first.end()
    await asyncio.gather(*(work.end() for work in waiting))
