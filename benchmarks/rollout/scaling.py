"""How cost grows.

    make bench-scaling, or python -m benchmarks.rollout.scaling [--only NAME,…] [--svg FILE]

Batch, prompt length, group size, adapters, rank and model size, one at a time: decoded tokens per CPU second,
and CPU milliseconds of a train step (forward_backward and optim_step). The tokens are those of decode steps
alone, see `decode.py`; with group size and adapters they are those of whole calls. Weights are random, every
LoRA is active. JSON on stdout, progress on stderr.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.kit.models import SHAPES, make
from benchmarks.kit.ours import Lorad, opened, prompts_of
from benchmarks.kit.workload import GROUP, LEARNING_RATE, RANK, Stopwatch, random_ids
from benchmarks.rollout import decode
from lorad.adapters.adapter import AdapterConfig
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Sampling
from lorad.trainers.base import SlotSpec

Points = list[tuple[float, float]]
Curves = dict[str, Points]
RATE, TRAIN = "tokens / CPU s", "train step, CPU ms"
LENGTH, NEW = 32, 16  # prompt and completion tokens where nothing else is said
TRIES = 3
SVG = Path(__file__).with_name("scaling.svg")

_numbers = count()  # no two calls have the same data


class Subject:
    """One model, opened, with what is measured of it."""

    def __init__(self, held: Lorad, name: str) -> None:
        self.held, self.name = held, name
        self.vocab = SHAPES[name].vocab
        self.modules = tuple(sorted(module for module in held.trainer.modules() if module != "lm_head"))
        self.slots: list[str] = []

    async def adapter(self, rank: int = RANK) -> str:
        """A fresh version in the engine."""
        number = next(_numbers)
        return await self.held.load(f"version{number}@1", number, rank)

    async def slot(self, rank: int = RANK) -> str:
        self.slots.append(f"slot{next(_numbers)}")
        await self.held.trainer.open(self.slots[-1], SlotSpec(AdapterConfig(rank, 2 * rank, self.modules)))
        return self.slots[-1]

    async def rate(self, version: str, rows: int, steps: int, length: int = LENGTH) -> float:
        """Tokens per CPU second of decode steps."""
        seconds = [
            await decode.step_seconds(self.held, version, next(_numbers), rows, steps, length)
            for _ in range(TRIES)
        ]
        return rows / statistics.median(seconds)

    async def calls_rate(self, versions: Sequence[str], prompts: int, group: int, tokens: int) -> float:
        """Tokens per CPU second of whole calls at once, one for each version, which share the prompts."""
        rates = []
        for _ in range(TRIES):
            number = next(_numbers)
            made = prompts_of(random_ids(number, prompts, LENGTH, self.vocab), group, number)
            parts = [made[index :: len(versions)] for index in range(len(versions))]
            watch = Stopwatch()
            calls = [
                self.held.complete(version, part, Sampling(tokens), version)
                for version, part in zip(versions, parts, strict=True)
            ]
            await asyncio.gather(*calls)
            rates.append(prompts * group * tokens / watch.lap())
        return statistics.median(rates)

    async def train_ms(self, slots: Sequence[str], prompts: int, group: int, length: int = LENGTH) -> float:
        """CPU milliseconds of a step in each slot, which share the prompts."""
        times = []
        for _ in range(TRIES):
            batches = [self._batch(max(1, prompts // len(slots)), group, length) for _ in slots]
            watch = Stopwatch()
            for slot, (batch, targets) in zip(slots, batches, strict=True):
                tokens = float(batch.completions.size)
                await self.held.trainer.forward_backward(slot, batch, targets, PolicyLoss(), tokens)
                await self.held.trainer.optim_step(slot, LEARNING_RATE, 1.0)
            times.append(1e3 * watch.lap())
        return statistics.median(times)

    def _batch(self, prompts: int, group: int, length: int) -> tuple[Batch, PolicyTargets]:
        number = next(_numbers)
        ids = random_ids(number, prompts, length, self.vocab).astype(np.int32)
        completions = random_ids(number, prompts * group, NEW, self.vocab).astype(np.int32)
        groups = completions.reshape(prompts, group, NEW)
        batch = Batch.of([(ids[p], list(groups[p])) for p in range(prompts)])
        advantages = np.random.default_rng(number).normal(size=prompts * group).astype(np.float32)
        advantages = np.repeat(advantages, batch.completion_lengths)
        return batch, PolicyTargets(advantages, np.full(completions.size, -5.0, np.float32))


@asynccontextmanager
async def subject(name: str, models: Path) -> AsyncIterator[Subject]:
    async with opened(make(name, models), mix_calls=True, max_rows=512) as held:
        opened_subject = Subject(held, name)
        await opened_subject.rate(await opened_subject.adapter(), 8, 2)  # warm
        yield opened_subject


async def batch(models: Path) -> dict[str, Curves]:
    """Rows that decode at once; samples in a train step, in groups of 8."""
    powers = {"tiny": range(10), "25m": (0, 1, 3, 5, 7, 9), "100m": (0, 1, 3, 5, 7)}
    return await curves(
        models, {name: [2**power for power in of] for name, of in powers.items()}, _batch_point
    )


async def _batch_point(of: Subject, size: int) -> tuple[float, float | None]:
    steps = max(4, min(32, {"tiny": 4096, "25m": 512, "100m": 128}[of.name] // size))
    rate = await of.rate(await of.adapter(), size, steps)
    fits = size >= GROUP and size <= {"tiny": 512, "25m": 128, "100m": 32}[of.name]
    return rate, await of.train_ms([await of.slot()], size // GROUP, GROUP) if fits else None


async def prompt(models: Path) -> dict[str, Curves]:
    """Tokens of the prompt; 8 samples of one prompt."""
    return await curves(models, {"tiny": [2**power for power in range(5, 13)]}, _prompt_point)


async def _prompt_point(of: Subject, length: int) -> tuple[float, float | None]:
    rate = await of.rate(await of.adapter(), GROUP, 32, length)
    return rate, await of.train_ms([await of.slot()], 1, GROUP, length)


async def group(models: Path) -> dict[str, Curves]:
    """Samples that share a prompt, 32 in all."""
    return await curves(
        models, {name: [2**power for power in range(6)] for name in ("tiny", "25m")}, _group_point
    )


async def _group_point(of: Subject, size: int) -> tuple[float, float | None]:
    rate = await of.calls_rate([await of.adapter()], 32 // size, size, NEW)
    return rate, await of.train_ms([await of.slot()], 32 // size, size)


async def adapters(models: Path) -> dict[str, Curves]:
    """Adapters that share 128 rows; slots that share a train step of 128 samples."""
    return await curves(models, {"tiny": [2**power for power in range(6)]}, _adapters_point)


async def _adapters_point(of: Subject, number: int) -> tuple[float, float | None]:
    rate = await of.calls_rate([await of.adapter() for _ in range(number)], 32, 4, 32)
    return rate, await of.train_ms([await of.slot() for _ in range(number)], 32, 4)


async def rank(models: Path) -> dict[str, Curves]:
    """Rank of the adapter; 32 rows."""
    return await curves(
        models, {name: [2**power for power in range(8)] for name in ("tiny", "25m")}, _rank_point
    )


async def _rank_point(of: Subject, size: int) -> tuple[float, float | None]:
    rate = await of.rate(await of.adapter(size), 32, 16)
    return rate, await of.train_ms([await of.slot(size)], 4, GROUP)


async def model(models: Path) -> dict[str, Curves]:
    """Million weights; 16 rows."""
    found: dict[str, Curves] = {RATE: {"all": []}, TRAIN: {"all": []}}
    for name, shape in SHAPES.items():
        async with subject(name, models) as of:
            millions = shape.parameters / 1e6
            found[RATE]["all"].append((millions, await of.rate(await of.adapter(), 16, 16)))
            found[TRAIN]["all"].append((millions, await of.train_ms([await of.slot()], 2, GROUP)))
    return found


async def curves(
    models: Path,
    wanted: dict[str, list[int]],
    point: Callable[[Subject, int], Awaitable[tuple[float, float | None]]],
) -> dict[str, Curves]:
    """Both quantities of every wanted point: {quantity: {model: points}}."""
    found: dict[str, Curves] = {RATE: {}, TRAIN: {}}
    for name, places in wanted.items():
        async with subject(name, models) as of:
            for place in places:
                rate, train = await point(of, place)
                label = SHAPES[name].label
                found[RATE].setdefault(label, []).append((place, rate))
                if train is not None:
                    found[TRAIN].setdefault(label, []).append((place, train))
                await forget(of)
    return found


async def forget(of: Subject) -> None:
    """Close what a point opened."""
    for version in await of.held.engine.loaded():
        await of.held.engine.unload(version.name)
    while of.slots:
        await of.held.trainer.close(of.slots.pop())


SWEEPS = {
    "batch": batch,
    "prompt tokens": prompt,
    "group size": group,
    "adapters": adapters,
    "rank": rank,
    "million weights": model,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="how cost grows with batch, prompt, group, adapters, rank and model"
    )
    parser.add_argument("--only", default=",".join(SWEEPS))
    parser.add_argument("--svg", type=Path, default=SVG, help="default: scaling.svg beside this file")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in SWEEPS]:
        parser.error(f"there is no sweep {', '.join(unknown)}; choose from {', '.join(SWEEPS)}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="lorad-bench-") as models:
        for name in options.only.split(","):
            watch = Stopwatch()
            found[name] = asyncio.run(SWEEPS[name](Path(models)))
            print(f"{name}: {watch.lap():.0f} CPU s", file=sys.stderr)
    print(json.dumps(found, indent=1))
    from benchmarks.kit.plots import draw_scaling

    draw_scaling(found, options.svg)


if __name__ == "__main__":
    main()
