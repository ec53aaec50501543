"""Versions of an adapter swapped under traffic on one engine: what it costs, what fails, what stays behind.

A swap loads version n + 1, turns the traffic to it and unloads version n, whose requests in flight end on it.
Names are never used twice and no two versions are alike.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.kit.workload import TINY
from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import write_peft
from lorad.box.paths import MEMORY
from lorad.engines.base import AdapterSource, Engine
from lorad.models.directory import linear_shapes, read_config
from lorad.protocol.batch import Batch, Chunk, Prompt, Sampling
from tests.kit.fakes.random_adapters import random_adapter

RANK = 8
PROMPT_TOKENS = 8
HOW = Sampling(max_new_tokens=16)
FIRST_TOKEN = Sampling(max_new_tokens=4)
VOCAB = (4, 100)  # ordinary tokens of builtin:tiny
WARM_UP_SECONDS, QUIET_SECONDS = 3.0, 8.0
KEPT_ERRORS = 5

SHAPES = linear_shapes(read_config(TINY))


@dataclass(frozen=True)
class Sample:
    """One that was made by `version`. crossed: another version was current when it ended than
    when it began.
    """

    version: int
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    crossed: bool

    @property
    def batch(self) -> Batch:
        return Batch.of([(self.prompt, [self.tokens])])


@dataclass
class Swap:
    """The seconds of one swap, and the MB that were resident after it (this process; all that it started)."""

    load: float
    first_token: float
    unload: float
    own_mb: float
    servers_mb: float


@dataclass
class Traffic:
    """`concurrency` callers, each of whom asks again as soon as it was answered."""

    engine: Engine
    concurrency: int
    mark: str  # what every version of this run is called
    current: int = 0
    ended: int = 0
    crossed: int = 0
    mixed: int = 0
    errors: list[str] = field(default_factory=list)
    # the last of each version, the crossing one if any
    samples: dict[int, Sample] = field(default_factory=dict)

    def name(self, version: int) -> str:
        return f"{self.mark}@{version}"

    async def ask(self, request: str, seed: int, how: Sampling = HOW) -> tuple[Sample, float]:
        """A sample of the current version, and when its first token came."""
        version = self.current
        tokens = np.random.default_rng(seed).integers(*VOCAB, PROMPT_TOKENS).astype(np.int32)
        chunks: list[Chunk] = []
        came = 0.0
        prompt = Prompt("p", tokens, np.array([seed], np.uint64))
        async for chunk in self.engine.generate(request, self.name(version), [prompt], how):
            came = came or time.perf_counter()
            chunks.append(chunk)
        self.mixed += any(chunk.version != self.name(version) for chunk in chunks)
        made = np.concatenate([chunk.tokens for chunk in chunks])
        if made.size != how.max_new_tokens:
            raise ValueError(f"{made.size} of {how.max_new_tokens} tokens came")
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        return Sample(version, tokens, made, logprobs, version != self.current), came

    async def caller(self, number: int) -> None:
        index = 0
        while True:
            index += 1
            try:
                sample, _ = await self.ask(f"caller {number}, {index}", number << 32 | index)
            except Exception as error:  # a request that fails is a result of the benchmark
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.05)
                continue
            self.ended += 1
            self.crossed += sample.crossed
            kept = self.samples.get(sample.version)
            if kept is None or sample.crossed or not kept.crossed:
                self.samples[sample.version] = sample

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        callers = [asyncio.create_task(self.caller(number)) for number in range(self.concurrency)]
        try:
            yield
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            await self.engine.drain()

    async def rate(self, seconds: float) -> float:
        """Requests per second over a while in which nothing is swapped."""
        before, began = self.ended, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.ended - before) / (time.perf_counter() - began)


def adapter_of(version: int) -> Adapter:
    return random_adapter(SHAPES, version, RANK)


async def load(traffic: Traffic, version: int) -> tuple[float, float]:
    """Load a version and turn the traffic to it; (when it began, when it was loaded)."""
    adapter = adapter_of(version)
    source = AdapterSource(adapter.digest(), adapter=adapter)
    began = time.perf_counter()
    await traffic.engine.load(traffic.name(version), source)
    loaded = time.perf_counter()
    traffic.current = version
    return began, loaded


async def swap(traffic: Traffic, version: int) -> tuple[Swap, float]:
    """Also how far the engine's own score of a sample of the new version is from its log-probabilities
    (nats).
    """
    began, loaded = await load(traffic, version)
    sample, came = await traffic.ask(f"first of {version}", version, FIRST_TOKEN)
    scored = await traffic.engine.score(traffic.name(version), sample.batch)
    leaving = time.perf_counter()
    await traffic.engine.unload(traffic.name(version - 1))
    gone = time.perf_counter()
    own, servers = resident()
    return Swap(loaded - began, came - began, gone - leaving, own, servers), float(
        np.abs(scored - sample.logprobs).max()
    )


async def swapped(engine: Engine, swaps: int, concurrency: int, work: Path) -> tuple[dict[str, Any], Traffic]:
    """What was measured until the engine is closed."""
    traffic = Traffic(engine, concurrency, f"swap{os.getpid()}")
    await load(traffic, 0)
    done: list[Swap] = []
    differences: list[float] = []
    async with traffic.flowing():
        await asyncio.sleep(WARM_UP_SECONDS)
        quiet = await traffic.rate(QUIET_SECONDS)
        before, ended, began = resident(), traffic.ended, time.perf_counter()
        for version in range(1, swaps + 1):
            made, difference = await swap(traffic, version)
            done.append(made)
            differences.append(difference)
        seconds = time.perf_counter() - began
        rate = (traffic.ended - ended) / seconds
    places = transports(traffic.mark, work)
    held = [version.name for version in await engine.loaded()]
    await engine.close()
    places = sorted({*(place for place in places if place.exists()), *transports(traffic.mark, work)})
    return {
        **summary(done, differences, before),
        **counts(traffic),
        "seconds": seconds,
        "requests_per_second": rate,
        "quiet_requests_per_second": quiet,
        "still_loaded": [name for name in held if name != traffic.name(swaps)],
        "leftovers": [str(place) for place in places],
        "processes_left": [process.name() for process in psutil.Process().children(recursive=True)],
    }, traffic


def counts(traffic: Traffic) -> dict[str, Any]:
    return {
        "requests": traffic.ended,
        "failed": len(traffic.errors),
        "errors": traffic.errors[:KEPT_ERRORS],
        "mixed": traffic.mixed,
        "crossed": traffic.crossed,
    }


def summary(
    done: Sequence[Swap], differences: Sequence[float], before: tuple[float, float]
) -> dict[str, Any]:
    """before: (own, servers) MB. slope: MB for each 100 swaps over the second half."""

    def milliseconds(values: Sequence[float], percent: float) -> float:
        return 1e3 * float(np.percentile(values, percent))

    own, servers = [swap.own_mb for swap in done], [swap.servers_mb for swap in done]
    return {
        "swaps": len(done),
        "load_ms": [milliseconds([swap.load for swap in done], percent) for percent in (50, 99)],
        "first_token_ms": [
            milliseconds([swap.first_token for swap in done], percent) for percent in (50, 99)
        ],
        "unload_ms": [milliseconds([swap.unload for swap in done], percent) for percent in (50, 99)],
        "own_mb": [before[0], own[-1], 100 * slope(own)],
        "servers_mb": [before[1], servers[-1], 100 * slope(servers)],
        "own_score_difference": max(differences),
        "trace": {"own_mb": own, "servers_mb": servers},
    }


def slope(values: Sequence[float]) -> float:
    """Fit a least-squares line through the second half; 0.0 for fewer than two values there."""
    half = np.array(values[len(values) // 2 :])
    return float(np.polyfit(np.arange(half.size), half, 1)[0]) if half.size > 1 else 0.0


def resident() -> tuple[float, float]:
    """MB of this process, and of all that it started. A process that ends meanwhile counts as nothing."""

    def of(process: psutil.Process) -> float:
        try:
            return float(process.memory_info().rss) / 1e6
        except psutil.NoSuchProcess:
            return 0.0

    this = psutil.Process()
    return of(this), sum(of(child) for child in this.children(recursive=True))


def transports(mark: str, work: Path) -> list[Path]:
    """What lies under this run's names where adapters travel, and the directories that hold it."""
    found = [path for top in (MEMORY, work) for path in top.glob(f"*/*{mark}*")]
    return sorted({*found, *(path.parent for path in found)})


def judged(samples: Sequence[Sample], versions: int, most: int, work: Path) -> dict[str, float]:
    """`most` samples against transformers and PEFT on the adapter of their version.

    right: the largest difference of any token (nats). wrong: the smallest of a sample under the version after
    its own, its largest token taken: what a sample of another version could not stay below.
    """
    from transformers.utils import logging  # heavy: only after memory was measured

    from tests.conformance.reference import reference_logprobs, reference_model

    logging.disable_progress_bar()
    chosen = samples[:: -(-len(samples) // most)]

    def difference(sample: Sample, version: int) -> float:
        directory = work / f"judge-{version}"
        if not directory.exists():
            directory.mkdir()
            write_peft(adapter_of(version), directory, str(TINY))
        expected = reference_logprobs(reference_model(TINY, directory), sample.batch).detach().numpy()
        return float(np.abs(sample.logprobs - expected).max())

    return {
        "judged": len(chosen),
        "judged_crossed": sum(sample.crossed for sample in chosen),
        "right": max(difference(sample, sample.version) for sample in chosen),
        "wrong": min(difference(sample, (sample.version + 1) % (versions + 1)) for sample in chosen),
    }
