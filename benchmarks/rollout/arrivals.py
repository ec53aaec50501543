"""A trace of continuous batching: requests of uneven lengths arrive one by one while others are being
decoded.

    make bench-arrivals, or python -m benchmarks.rollout.arrivals [--svg FILE]     JSON on stdout

The engine's quantum is set to one decode step, and requests arrive at numbered steps, so the trace is the
same on any machine. For each decode step it holds how many rows decode and how many samples wait. As long as
somebody waits, nearly all rows should be busy; they cannot all be, because several are admitted at once.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from benchmarks.kit.workload import TINY
from lorad.engines.base import BASE
from lorad.engines.builtin import engine as builtin
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.protocol.batch import Prompt, Sampling

SVG = Path(__file__).with_name("arrivals.svg")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Arrival:
    """One request: at which decode step it comes, and how many tokens it will have."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Trace:
    """rows[i] samples were decoded in step i while waiting[i] more were there; lengths: of the answers."""

    max_rows: int
    rows: list[int]
    waiting: list[int]
    lengths: list[int]

    @property
    def occupancy(self) -> float:
        """The mean share of busy rows over the steps during which somebody waited."""
        busy = [rows for rows, waiting in zip(self.rows, self.waiting, strict=True) if waiting]
        return sum(busy) / (len(busy) * self.max_rows)


class SteppingCompute(Compute):
    """Calls `after` on the event loop whenever a quantum of decoding has ended."""

    after: Callable[[], None] = staticmethod(lambda: None)

    async def until(self, quantum: Callable[[], T | None]) -> T:
        while True:
            result = await self.run(quantum)
            self.after()
            if result is not None:
                return result


class Run:
    """Arrivals against an engine, step by step."""

    def __init__(
        self, base: Base, compute: SteppingCompute, arrivals: Sequence[Arrival], max_rows: int
    ) -> None:
        self.engine = builtin.BuiltinEngine(base, compute, TINY, mix_calls=True, max_rows=max_rows)
        self.left = sorted(arrivals, key=lambda arrival: arrival.step)
        self.trace = Trace(max_rows, [], [], [0] * len(arrivals))
        self.calls: list[asyncio.Task[None]] = []
        self.before = (0, 0)
        compute.after = self.after_quantum

    async def __call__(self) -> Trace:
        self.admit()
        while running := [call for call in self.calls if not call.done()]:
            await asyncio.gather(*running)
            # nothing to do until the next one comes
            if self.left and all(call.done() for call in self.calls):
                self.start()
        await self.engine.close()
        return self.trace

    def after_quantum(self) -> None:
        """A quantum after which more samples run than before admitted some;
        any other one was a decode step.
        """
        now = self.look()
        rows, waiting = self.before
        if rows and now[0] <= rows:
            self.trace.rows.append(rows)
            self.trace.waiting.append(waiting)
        self.admit()
        self.before = now

    def look(self) -> tuple[int, int]:
        """(running, waiting) by the engine's own word; health awaits nothing, so it can be asked here."""
        asked = self.engine.health()
        try:
            asked.send(None)
        except StopIteration as answer:
            return answer.value.running, answer.value.waiting
        raise AssertionError("health awaited something")

    def admit(self) -> None:
        while self.left and self.left[0].step <= len(self.trace.rows):
            self.start()

    def start(self) -> None:
        self.calls.append(asyncio.create_task(self.call(len(self.calls), self.left.pop(0))))

    async def call(self, number: int, arrival: Arrival) -> None:
        tokens = np.random.default_rng(number).integers(4, 100, 4 + number % 5).astype(np.int32)
        prompt = Prompt("p", tokens, np.array([number], np.uint64))
        async for chunk in self.engine.generate(
            f"request {number}", BASE, [prompt], Sampling(arrival.tokens)
        ):
            self.trace.lengths[number] += chunk.tokens.size


def random_arrivals(number: int, per_step: float, mean: int, cap: int, seed: int = 0) -> list[Arrival]:
    """A Poisson process in steps; geometric lengths with the tail cut at `cap`."""
    rng = random.Random(seed)
    arrivals, time = [], 0.0
    for _ in range(number):
        length = 1
        while length < cap and rng.random() >= 1 / mean:
            length += 1
        arrivals.append(Arrival(int(time), length))
        time += rng.expovariate(per_step)
    return arrivals


def two_waves() -> list[Arrival]:
    """More than 32 rows can serve, a lull, and again."""
    first, second = random_arrivals(200, 2.0, 24, 96, seed=1), random_arrivals(120, 3.0, 24, 96, seed=2)
    return first + [Arrival(arrival.step + 260, arrival.tokens) for arrival in second]


async def traced(arrivals: Sequence[Arrival], max_rows: int) -> Trace:
    """The trace of the arrivals on builtin:tiny. The engine's QUANTUM must be 0: one step at a time."""
    compute = SteppingCompute()
    try:
        base = load_base(TINY, torch.float32, torch.device("cpu"))
        return await Run(base, compute, arrivals, max_rows)()
    finally:
        compute.close()


def main() -> None:
    from benchmarks.kit.plots import draw_trace  # a test needs the trace alone

    parser = argparse.ArgumentParser(description="continuous batching, step by step")
    parser.add_argument("--svg", type=Path, default=SVG, help="default: arrivals.svg beside this file")
    options = parser.parse_args()
    builtin.QUANTUM = 0.0
    trace = asyncio.run(traced(two_waves(), 32))
    print(json.dumps({"occupancy": trace.occupancy, **asdict(trace)}))
    draw_trace(trace.rows, trace.waiting, trace.max_rows, options.svg)


if __name__ == "__main__":
    main()
