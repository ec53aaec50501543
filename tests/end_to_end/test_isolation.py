"""Runs in one pool do not touch each other: eight interleaved ones end as each alone, whatever becomes of a
ninth.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from lorad.adapters.peft import read_peft
from lorad.errors import Fenced, LoradError
from lorad.protocol.batch import Batch, Chunk, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.protocol.calls import Evict, ForwardBackward, Generate, Nothing, Open, OptimStep, Stepped
from lorad.protocol.connection import Connection
from lorad.protocol.status import PoolStatus
from tests.conformance.engine_suite import whole
from tests.kit.pool_kit import DEADLINE, MODULES, Running, batch, publish, running_pool

pytestmark = pytest.mark.system

STEPS = 2
LR = 1e-2


class Run(NamedTuple):
    """One of eight that differ in everything that may differ."""

    number: int

    @property
    def open(self) -> Open:
        kinds = ("q_proj", "v_proj", "up_proj", "down_proj", "k_proj", "o_proj", "gate_proj", "")
        return Open(
            modules=tuple(m for m in MODULES if m.endswith(kinds[self.number]) or "layers.0" in m),
            rank=(4, 6, 8, 12, 16, 5, 7, 9)[self.number],
            alpha=(4.0, 32.0, 8.0, 16.0)[self.number % 4],
            dropout=0.1 if self.number == 5 else 0.0,
            seed=self.number,
            canaries=2,
            canary_tokens=8,
            priority=self.number % 3,
        )

    def prompts(self, step: int) -> list[Prompt]:
        rng = np.random.default_rng(100 * self.number + step)
        length, samples = 3 + self.number, 2 + self.number % 3
        return [
            Prompt(
                str(i),
                rng.integers(4, 100, length).astype(np.int32),
                rng.integers(0, 1 << 62, samples, np.uint64),
            )
            for i in range(1 + self.number % 2)
        ]

    def batch(self, step: int, chunks: Sequence[Chunk]) -> ForwardBackward:
        """The advantages are made up from the tokens."""
        prompts, samples = self.prompts(step), whole(chunks)
        groups = [[samples[prompt.id, index] for index in range(prompt.seeds.size)] for prompt in prompts]
        completions = [[chunk.tokens for chunk in group] for group in groups]
        made = Batch.of(list(zip([p.tokens for p in prompts], completions, strict=True)))
        each = np.array([np.sin(c.sum()) for group in completions for c in group], np.float32)
        advantages = np.repeat(each, made.completion_lengths)
        logprobs = np.concatenate([chunk.logprobs for group in groups for chunk in group])
        return ForwardBackward(made, PolicyTargets(advantages, logprobs), PolicyLoss(), float(logprobs.size))


RUNS = [Run(number) for number in range(8)]


class Trace(NamedTuple):
    """What a run did: the tokens, batches and losses of each step, and the digest of each version."""

    batches: list[ForwardBackward]
    losses: list[float]
    digests: list[str]


def lived(running: Running, run: Run, name: str, directory: Path) -> Trace:
    """A run from its beginning to its end."""
    trace = Trace([], [], [])
    with running.connect(name) as connection:
        connection.call("open", run.open)
        trace.digests.append(publish(connection, directory, 0).sha256)
        for step in range(STEPS):
            ask = Generate(f"{name}@{step}", run.prompts(step), Sampling(5 + run.number, stream=False))
            *items, _ = connection.stream("generate", ask)
            chunks = [chunk for item in items for chunk in item.split(ask.prompts)]
            trained(connection, run.batch(step, chunks), trace)
            trace.digests.append(publish(connection, directory, step + 1).sha256)
        connection.call("close", Nothing())
    return trace


def trained(connection: Connection, work: ForwardBackward, trace: Trace) -> None:
    trace.batches.append(work)
    trace.losses.append(connection.call("forward_backward", work).loss)
    assert connection.call("optim_step", OptimStep(LR, 1.0)).applied


def at_once(*lives: Callable[[], object]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    errors: list[BaseException] = []

    def live(life: Callable[[], object]) -> None:
        try:
            life()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(life,), daemon=True) for life in lives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"


def together(
    running: Running, runs: Sequence[Run], directory: Path, *others: Callable[[], object]
) -> dict[Run, Trace]:
    traces: dict[Run, Trace] = {}

    def life(run: Run) -> Callable[[], None]:
        return lambda: traces.update({run: lived(running, run, f"{directory.name}-{run.number}", directory)})

    at_once(*map(life, runs), *others)
    return traces


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the versions of those that were alone are."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(running: Running, home: Path) -> dict[Run, Trace]:
    return {run: lived(running, run, f"alone-{run.number}", home) for run in RUNS}


def same(found: dict[Run, Trace], alone: dict[Run, Trace]) -> bool:
    """Tokens and their log-probabilities, losses and weights, bit for bit."""
    for run, trace in found.items():
        for mine, its in zip(trace.batches, alone[run].batches, strict=True):
            assert mine.batch.completions.tolist() == its.batch.completions.tolist(), run
            ours, theirs = mine.targets.sampler_logprobs, its.targets.sampler_logprobs
            assert ours is not None and theirs is not None and ours.tolist() == theirs.tolist(), run
        assert (trace.losses, trace.digests) == (alone[run].losses, alone[run].digests), run
    return True


def test_interleaved_runs_end_bit_for_bit_alike(
    running: Running, alone: dict[Run, Trace], tmp_path: Path
) -> None:
    assert len({digest for trace in alone.values() for digest in trace.digests}) == len(RUNS) * (STEPS + 1)
    assert same(together(running, RUNS, tmp_path), alone)


def test_status_has_waits_and_memory_of_runs(running: Running, tmp_path: Path) -> None:
    waited: list[float] = []

    def life(name: str) -> None:
        with running.connect(name) as connection:
            connection.call("open", RUNS[0].open)
            connection.call("forward_backward", batch(samples=64))
            stepped: Stepped = connection.call("optim_step", OptimStep(LR, 1.0))
            status: PoolStatus = connection.call("status", Nothing())
            tenant = next(tenant for tenant in status.tenants if tenant.run == name)
            assert tenant.waited >= stepped.waited and tenant.bytes == tenant.parameters * 16
            assert (
                status.capacity is not None
                and status.capacity.memory > status.capacity.memory_used >= tenant.bytes
            )
            waited.append(stepped.waited)
            connection.call("close", Nothing())

    at_once(lambda: life("a"), lambda: life("b"))
    assert all(seconds > 0 for seconds in waited)


def spoils_itself(running: Running, name: str, directory: Path) -> None:
    """A run whose gradients, then whose weights are no numbers."""
    with running.connect(name) as connection:
        connection.call("open", RUNS[2].open)
        good = batch()
        bad = msgspec.structs.replace(
            good,
            targets=msgspec.structs.replace(
                good.targets, advantages=good.targets.advantages * np.float32(np.nan)
            ),
        )
        connection.call("forward_backward", bad)
        assert not connection.call("optim_step", OptimStep(LR, 1.0)).applied
        assert publish(connection, directory, 0).attestation.verdict == "passed"
        for _ in range(2):
            connection.call("forward_backward", good)
            connection.call("optim_step", OptimStep(1e30, 0.0))
        with pytest.raises(LoradError, match=r"finite|failed its attestation"):
            publish(connection, directory, 1)
        connection.call("close", Nothing())


def is_superseded(running: Running, name: str) -> None:
    """A run that is killed amid a stream and before a step; its next attempt opens, and is evicted."""
    with (
        running.connect(name) as first,
        running.connect(name) as late,
        running.connect(name, attempt=2) as second,
    ):
        first.call("open", RUNS[4].open)
        next(first.stream("generate", Generate("base", RUNS[4].prompts(0), Sampling(max_new_tokens=2000))))
        second.call("open", RUNS[4].open)
        second.call("forward_backward", batch(samples=32))
        with pytest.raises(Fenced):
            late.call("forward_backward", batch())
    with running.connect() as daemon:
        daemon.call("evict", Evict(name, 2))


def test_bad_and_killed_runs_change_no_neighbour(
    running: Running, alone: dict[Run, Trace], tmp_path: Path
) -> None:
    others = (lambda: spoils_itself(running, "spoilt", tmp_path), lambda: is_superseded(running, "killed"))
    assert same(together(running, RUNS[:4], tmp_path, *others), alone)
    with running.connect() as connection:
        status: PoolStatus = connection.call("status", Nothing())
    assert status.tenants == [] and status.loaded == []


def distance(one: Path, other: Path, start: Path) -> float:
    """How far two adapters are from each other, in lengths of the way that one of them has come (L2 over
    all).
    """
    found, wanted, begun = (read_peft(path).tensors for path in (one, other, start))
    apart = sum(float(((found[name] - wanted[name]) ** 2).sum()) for name in wanted)
    way = sum(float(((wanted[name] - begun[name]) ** 2).sum()) for name in wanted)
    return float(np.sqrt(apart / way))


def replayed(
    running: Running, run: Run, name: str, batches: Sequence[ForwardBackward], directory: Path
) -> None:
    """A run on recorded batches, which samples all the same."""
    with running.connect(name) as connection:
        connection.call("open", run.open)
        for step, work in enumerate(batches):
            publish(connection, directory, step)
            *_, done = connection.stream(
                "generate", Generate(f"{name}@{step}", run.prompts(step), Sampling(12))
            )
            assert done.tokens > 0
            trained(connection, work, Trace([], [], []))
        publish(connection, directory, len(batches))
        connection.call("close", Nothing())


def test_runs_sharing_passes_differ_only_by_rounding(
    alone: dict[Run, Trace], home: Path, tmp_path: Path
) -> None:
    with running_pool(tmp_path, deterministic=False) as mixing:
        lives = [
            lambda run=run: replayed(mixing, run, f"mixed-{run.number}", alone[run].batches, tmp_path)
            for run in RUNS
        ]
        at_once(*lives, lambda: spoils_itself(mixing, "spoilt", tmp_path))
        with mixing.connect() as connection:
            health = connection.call("status", Nothing()).engine
    for run in RUNS:
        mine, its = (
            root / f"{kind}-{run.number}/versions" for root, kind in ((tmp_path, "mixed"), (home, "alone"))
        )
        assert distance(mine / f"{STEPS:06d}", its / f"{STEPS:06d}", its / "000000") < 1e-3, run
    assert health.adapters_per_step >= 1
