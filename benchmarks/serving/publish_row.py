"""`make bench-publish`: a step's weights on their way to a server, as an adapter and as a whole merged model.

    python -m benchmarks.serving.publish_row [--rounds N] [--engines sglang,vllm] [--json FILE]

100 M parameters in fp32, LoRA of rank 16 on all linears, until the first token of the new weights. lorad
exports the adapter, writes it where the server reads it and loads it under a new name. The peer does what TRL
does: merge the adapter into the base (PEFT), hand over every weight, unmerge; its server is the same one
without LoRA. TRL broadcasts by NCCL, which needs GPUs; here the weights go through a directory in memory and
the server's own route to update
itself: /update_weights_from_disk (SGLang), reload_weights by /collective_rpc (vLLM). Both sides take turns in
one run; milliseconds are wall time, CPU milliseconds are of all processes of the run together.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.kit.models import make
from benchmarks.kit.ours import Lorad
from benchmarks.kit.ours import opened as trained
from benchmarks.kit.workload import ALPHA, LEARNING_RATE, RANK
from benchmarks.serving.merged import Merged
from benchmarks.serving.plain_server import PlainServer, without_lora
from lorad.adapters.adapter import AdapterConfig
from lorad.box.paths import MEMORY
from lorad.engines.base import AdapterSource, Engine
from lorad.protocol.batch import Prompt, Sampling
from lorad.trainers.base import SlotSpec
from tests.engines.real.places import KINDS, opened, python_of, variable

MODEL = "100m"
CONTEXT = 128
PROMPT = np.arange(5, 21, dtype=np.int32)
ONE_TOKEN = Sampling(max_new_tokens=1)


@dataclass
class Laps:
    """Milliseconds of each phase of one publish: {phase: ms}, and CPU ms of all processes for the whole."""

    phases: dict[str, float] = field(default_factory=dict)
    megabytes: float = 0.0
    cpu: float = 0.0

    def __post_init__(self) -> None:
        self._cpu_began, self._last = cpu_seconds(), time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = 1e3 * (now - self._last)
        self._last = now

    def end(self, megabytes: float) -> "Laps":
        self.cpu = 1e3 * (cpu_seconds() - self._cpu_began)
        self.megabytes = megabytes
        return self


def cpu_seconds() -> float:
    """Sum the CPU seconds of this process and all that it started."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


async def by_adapter(held: Lorad, engine: Engine, version: int) -> Laps:
    """lorad's way."""
    name = f"adapter@{version}"
    laps = Laps()
    adapter = await held.trainer.export("bench")
    laps.lap("export")
    await engine.load(name, AdapterSource(adapter.digest(), adapter))
    laps.lap("write and load")
    async for _ in engine.generate(
        name, name, [Prompt("p", PROMPT, np.array([version], np.uint64))], ONE_TOKEN
    ):
        laps.lap("first token")
    return laps.end(adapter.bytes / 1e6)


async def by_merge(merged: Merged, server: PlainServer, directory: Path, version: int) -> Laps:
    """TRL's way; it unmerges before it trains on, after the first token here."""
    laps = Laps()
    merged.merge()
    laps.lap("merge")
    size = merged.write(directory)
    laps.lap("write")
    await server.update(directory)
    laps.lap("update")
    await server.first_token(PROMPT, version)
    laps.lap("first token")
    laps.end(size / 1e6)
    merged.unmerge()
    return laps


async def measured(kind: str, model: Path, held: Lorad, merged: Merged, rounds: int) -> dict[str, Any]:
    """Both sides in turn against servers of one kind; the first round is not counted."""
    modules = tuple(sorted(name for name in held.trainer.modules() if name != "lm_head"))
    await held.trainer.open("bench", SlotSpec(AdapterConfig(RANK, ALPHA, modules)))
    sides: dict[str, list[Laps]] = {"adapter": [], "merge": []}
    async with places(kind, model) as (engine, server, directory):
        for version in range(rounds + 1):
            print(f"{kind}: round {version} of {rounds}", file=sys.stderr)
            await held.trainer.optim_step("bench", LEARNING_RATE, 1.0)
            sides["adapter"].append(await by_adapter(held, engine, version))
            merged.change(version)
            sides["merge"].append(await by_merge(merged, server, directory, version))
            await engine.unload(f"adapter@{version}")
        difference = await merged.difference(server)
    await held.trainer.close("bench")
    return {
        "engine": kind,
        "merged_difference": difference,
        **{side: medians(laps[1:]) for side, laps in sides.items()},
    }


@asynccontextmanager
async def places(kind: str, model: Path) -> AsyncIterator[tuple[Engine, PlainServer, Path]]:
    """A server with LoRA, one without, and where merged weights are written, in memory."""
    with (
        tempfile.TemporaryDirectory(prefix="lr-") as work,
        tempfile.TemporaryDirectory(prefix="lr-merged-", dir=MEMORY) as directory,
    ):
        (Path(directory) / "config.json").write_bytes((model / "config.json").read_bytes())
        async with (
            opened(kind, Path(work), model, context_length=CONTEXT) as engine,
            without_lora(kind, Path(work), model, CONTEXT) as server,
        ):
            yield engine, server, Path(directory)


def medians(laps: Sequence[Laps]) -> dict[str, Any]:
    phases = {name: statistics.median(lap.phases[name] for lap in laps) for name in laps[0].phases}
    totals = [sum(lap.phases.values()) for lap in laps]
    return {
        "megabytes": laps[0].megabytes,
        "ms": statistics.median(totals),
        "ms_all": totals,
        "cpu_ms": statistics.median(lap.cpu for lap in laps),
        "phases": phases,
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="a step's weights to a server, 100 M parameters fp32, rank 16 (medians, wall ms)")
    for name in ("", "MB", "ms", "CPU ms", "of which"):
        table.add_column(name, justify="left" if name in ("", "of which") else "right")
    for found in results:
        for side in ("adapter", "merge"):
            row = found[side]
            parts = ", ".join(f"{name} {value:.0f}" for name, value in row["phases"].items())
            numbers = (f"{row['megabytes']:.1f}", f"{row['ms']:.0f}", f"{row['cpu_ms']:.0f}")
            table.add_row(f"{found['engine']}, {side}", *numbers, parts)
        adapter, merge = found["adapter"], found["merge"]
        ratios = [f"{merge[what] / adapter[what]:.1f}x" for what in ("megabytes", "ms", "cpu_ms")]
        table.add_row(
            "  the adapter is less by", *ratios, f"merged weights as PEFT: {found['merged_difference']:.0e}"
        )
    console = Console(stderr=True, width=130)
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


async def all_kinds(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lorad-bench-") as models:
        model = make(MODEL, Path(models))
        merged = Merged(model)
        async with trained(model) as held:
            return [await measured(kind, model, held, merged, options.rounds) for kind in options.engines]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="publishing by adapter against merging and pushing all weights"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each side (default 5)")
    parser.add_argument("--engines", default=",".join(KINDS), help="of: %(default)s")
    parser.add_argument("--json", type=Path, help="write the result there instead of to stdout")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    if lacking := [kind for kind in options.engines if kind not in KINDS or not python_of(kind)]:
        parser.error(f"{', '.join(map(variable, lacking))} must name the interpreter of the server")
    return options


def main() -> None:
    options = parse()
    results = asyncio.run(all_kinds(options))
    show(results)
    text = json.dumps({"load": os.getloadavg()[0], "engines": results}, indent=2)
    print(text) if options.json is None else options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
