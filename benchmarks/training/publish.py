"""Measure `publish`: from "the optimizer step is done" to "the engine serves the new version", 100 M, rank
16.

In process: export, digest, load. Through files: export, a durable PEFT directory with its manifest, load from
there. Attestation is left out. CPU milliseconds; of the files, wall milliseconds too (they wait for the
disk).
"""

import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.kit.models import make
from benchmarks.kit.ours import Lorad, opened
from benchmarks.kit.workload import ALPHA, LEARNING_RATE, RANK, Figures, Stopwatch, Turn, play
from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.directory import write_directory
from lorad.adapters.peft import write_peft
from lorad.engines.base import AdapterSource
from lorad.trainers.base import SlotSpec

MODEL = "100m"
WARM_UP = 2


async def in_process(held: Lorad, name: str) -> None:
    adapter = await held.trainer.export("bench")
    await held.engine.load(name, AdapterSource(adapter.digest(), adapter))


async def through_files(held: Lorad, name: str, directory: Path) -> None:
    adapter = await held.trainer.export("bench")
    write_directory(directory, lambda made: write_peft(adapter, made, MODEL))
    await held.engine.load(name, AdapterSource(adapter.digest(), directory=directory))


async def measured(turn: Turn, directory: Path) -> Figures:
    figures: Figures = {"memory_ms": [], "files_ms": [], "files_wall_ms": []}
    async with opened(make(MODEL, turn.models)) as held:
        modules = tuple(sorted(name for name in held.trainer.modules() if name != "lm_head"))
        await held.trainer.open("bench", SlotSpec(AdapterConfig(RANK, ALPHA, modules)))
        for index in range(turn.repeats + WARM_UP):
            await held.trainer.optim_step("bench", LEARNING_RATE, 1.0)
            watch = Stopwatch()
            await in_process(held, f"memory@{index}")
            figures["memory_ms"].append(1e3 * watch.lap())
            began = time.perf_counter()
            await through_files(held, f"files@{index}", directory / str(index))
            figures["files_ms"].append(1e3 * watch.lap())
            figures["files_wall_ms"].append(1e3 * (time.perf_counter() - began))
            await held.engine.unload(f"memory@{index}")
            await held.engine.unload(f"files@{index}")
    return {name: values[WARM_UP:] for name, values in figures.items()}


def lorad(turn: Turn) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(measured(turn, Path(directory)))


if __name__ == "__main__":
    play({"lorad": lorad})
