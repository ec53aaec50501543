"""`make bench-many`: GRPO runs in one pool, against the same one after another, and each in a pool of its own
at once.

    python -m benchmarks.load.many [--runs 8] [--steps 60] [--prompts 4] [--rounds 1] [--json FILE]

Every way begins in an empty home and ends with the last run: pools are started, bases loaded and all files
written within the reported time. The ways take turns, so that a busy neighbour slows all of them. Runs differ
in rank, task and seed. The figure is wall time, since it covers what the runs share and what drivers do
beside the pool.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.kit.world import World, world

SPEC = """
deterministic: false
algorithm: {group_size: 8}
trainer: {lr: 1.0e-3}
rollout: {max_new_tokens: 16}
eval: {every: 0, problems: 256}
checkpoint: {every: 1000000}
"""
RANKS, TASKS = (4, 8, 16), ("sort", "reverse")
ADAPTER_BYTES = 16  # fp32 weights, gradients and two moments, for each parameter
MEMORY_LIMIT, TIME_LIMIT = 1.25, 0.75
VERBS = ("sample", "score", "train", "publish")
DEADLINE = 1800.0

Found = dict[str, Any]


def overrides(number: int, options: argparse.Namespace) -> list[str]:
    task = TASKS[number % len(TASKS)]
    return [
        f"lora.rank={RANKS[number % len(RANKS)]}",
        f"data.train={task}",
        f"seed={number}",
        f"data.prompts_per_step={options.prompts}",
        f"trainer.steps={options.steps}",
        f"eval.every={options.steps}",
    ]


def submit(made: World, number: int, options: argparse.Namespace) -> str:
    name = f"run-{number}"
    made.lorad("run", made.spec(SPEC), *overrides(number, options), "--name", name, "--detach")
    return name


def together(options: argparse.Namespace) -> Found:
    """All in one pool."""
    with world() as made:
        started = time.monotonic()
        names = [submit(made, number, options) for number in range(options.runs)]
        watched = watch([made], names)
        found = summary([(made, names)], time.monotonic() - started, watched)
        return found | {"idle_bytes": idle_bytes(made)}


def alone(options: argparse.Namespace) -> Found:
    """The first of them: what a pool needs for one."""
    return together(argparse.Namespace(runs=1, steps=options.steps, prompts=options.prompts))


def idle_bytes(made: World) -> int | None:
    """The most that the same pool needs to load its base and to wait."""
    (pool,) = made.client.pools()
    made.client.stop_pool(pool.pool)
    made.until(lambda: not made.client.pools(), "the pool has ended")
    root = made.home.pool(pool.pool)
    command = json.loads((root / "attempts" / "0001" / "command.json").read_text())
    with subprocess.Popen(command["argv"], env=os.environ | command["env"], cwd=root) as process:
        made.until(lambda: made.home.pool_socket(pool.pool).exists(), "the pool serves")
        peak = peak_of(process.pid)
        process.terminate()
    return peak


def one_after_another(options: argparse.Namespace) -> Found:
    """In one pool that stays warm, each when the one before is over."""
    with world() as made:
        started, names, watched = time.monotonic(), list[str](), Watched()
        for number in range(options.runs):
            names.append(submit(made, number, options))
            watched = watch([made], names, watched)
        return summary([(made, names)], time.monotonic() - started, watched)


def apart(options: argparse.Namespace) -> Found:
    """All at once, each with a base of its own."""
    with contextlib.ExitStack() as stack:
        worlds = [stack.enter_context(world()) for _ in range(options.runs)]
        started = time.monotonic()
        names = [submit(made, number, options) for number, made in enumerate(worlds)]
        watched = watch(worlds, names)
        seconds = time.monotonic() - started
        return summary([(made, [name]) for made, name in zip(worlds, names, strict=True)], seconds, watched)


class Watched:
    """The most memory of each process, by pid, in bytes; adapters: distinct in a decode step, as the engine
    says.
    """

    def __init__(self) -> None:
        self.pools: dict[int, int] = {}
        self.drivers: dict[int, int] = {}
        self.adapters: list[float] = []

    def look(self, made: World) -> None:
        for pool in made.client.pools():
            if pool.pid and (peak := peak_of(pool.pid)):
                self.pools[pool.pid] = peak
                if isinstance(told := pool.engine.adapters_per_step, float) and len(pool.tenants) > 1:
                    self.adapters.append(told)
        for run in made.client.list():
            for process in made.client.show(run.name).processes:
                if process.role == "driver" and process.pid and (peak := peak_of(process.pid)):
                    self.drivers[process.pid] = peak


def peak_of(pid: int) -> int | None:
    """VmHWM: the most that was ever resident."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return None


def watch(worlds: list[World], names: list[str], watched: Watched | None = None) -> Watched:
    """Until all runs are over. Raises SystemExit when one does not complete."""
    watched, deadline = watched or Watched(), time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        runs = [run for made in worlds for run in made.client.list() if run.name in names]
        for made in worlds:
            watched.look(made)
        if failed := [run for run in runs if run.state == "ended" and run.reason != "completed"]:
            raise SystemExit(f"{failed[0].name} {failed[0].reason}: {failed[0].detail}")
        if all(run.state == "ended" for run in runs):
            return watched
        time.sleep(0.5)
    raise SystemExit(f"not all runs were over within {DEADLINE:.0f} s")


def summary(homes: list[tuple[World, list[str]]], seconds: float, watched: Watched) -> Found:
    runs = [made.client.show(name) for made, names in homes for name in names]
    steps = [step.metrics for made, names in homes for name in names for step in made.client.steps(name)]
    return {
        "seconds": seconds,
        "pools": len(watched.pools),
        "pool_bytes": sum(watched.pools.values()),
        "driver_bytes": sum(watched.drivers.values()),
        "adapter_bytes": sum(run.trainable.parameters for run in runs if run.trainable) * ADAPTER_BYTES,
        "rewards": {run.name: run.eval_last for run in runs},
        "first_rewards": {run.name: run.eval_first for run in runs},
        "verbs": {verb: sum(step[f"seconds_{verb}"] for step in steps) for verb in VERBS},
        "waited": sum(step.get("seconds_waited", 0.0) for step in steps),
        "stepping": sum(step["seconds"] for step in steps),
        "adapters_per_step": statistics.median(watched.adapters) if watched.adapters else None,
    }


WAYS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "one pool": together,
    "one after another": one_after_another,
    "a pool each": apart,
    "one run": alone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="many runs on one warm base")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=4, help="of a step; each is sampled eight times")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each way")
    parser.add_argument("--ways", default=",".join(WAYS), help="of: %(default)s")
    parser.add_argument("--json", type=Path, help="write the result there instead of to stdout")
    options = parser.parse_args()
    found: dict[str, list[Found]] = {way: [] for way in options.ways.split(",")}
    for number in range(options.rounds):
        for way in found:
            print(f"round {number + 1} of {options.rounds}: {options.runs} runs, {way}", file=sys.stderr)
            found[way].append(WAYS[way](options))
    show(found, options)
    result = {"runs": options.runs, "steps": options.steps, "load": os.getloadavg()[0], "ways": found}
    text = json.dumps(result, indent=2)
    print(text) if options.json is None else options.json.write_text(text + "\n")


def show(found: dict[str, list[Found]], options: argparse.Namespace) -> None:
    """One column for each way; of several rounds the medians."""
    title = (
        f"{options.runs} GRPO runs of {options.steps} steps with {options.prompts} x 8 samples on "
        "builtin:tiny"
    )
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for way in found:
        table.add_column(way, justify="right")
    for what, cells in rows(found):
        table.add_row(what, *cells)
    console = Console(stderr=True, width=120)
    console.print(table)
    for line in verdicts(found):
        console.print(line, soft_wrap=True)


def median(turns: list[Found], key: str) -> float:
    return statistics.median(float(turn[key]) for turn in turns)


def rows(found: dict[str, list[Found]]) -> Iterator[tuple[str, list[str]]]:
    columns = list(found.values())
    yield "total, s", [f"{median(turns, 'seconds'):.1f}" for turns in columns]
    for verb in VERBS:
        each = [statistics.median(turn["verbs"][verb] for turn in turns) for turns in columns]
        yield f"  in {verb}, all runs, s", [f"{seconds:.1f}" for seconds in each]
    yield "  of it waiting for a turn, s", [f"{median(turns, 'waited'):.1f}" for turns in columns]
    yield "pools", [f"{median(turns, 'pools'):.0f}" for turns in columns]
    yield "pools, peak MB", [f"{median(turns, 'pool_bytes') / 1e6:.0f}" for turns in columns]
    yield "drivers, peak MB", [f"{median(turns, 'driver_bytes') / 1e6:.0f}" for turns in columns]
    distinct = [
        [turn["adapters_per_step"] for turn in turns if turn["adapters_per_step"]] for turns in columns
    ]
    yield (
        "adapters in a decode step",
        [f"{statistics.median(values):g}" if values else "" for values in distinct],
    )
    for name in columns[0][0]["rewards"]:
        told = [(turns[0]["rewards"].get(name), turns[0]["first_rewards"].get(name)) for turns in columns]
        cells = [f"{after:.3f} ({before:.3f})" if after is not None else "" for after, before in told]
        yield f"held-out reward of {name} (before)", cells


def verdicts(found: dict[str, list[Found]]) -> Iterator[str]:
    if "one pool" not in found:
        return
    pool = found["one pool"]
    if "one after another" in found:
        ratio = median(pool, "seconds") / median(found["one after another"], "seconds")
        yield f"time: {ratio:.2f} of one after another (at most {TIME_LIMIT:g})"
    peak, adapters = median(pool, "pool_bytes"), median(pool, "adapter_bytes")
    idle = median(pool, "idle_bytes")
    made_of = f"an idle pool ({idle / 1e6:.0f} MB) and all adapters ({adapters / 1e6:.1f} MB)"
    yield f"memory: {peak / (idle + adapters):.2f} of {made_of}"
    if "one run" in found:
        one, its = median(found["one run"], "pool_bytes"), median(found["one run"], "adapter_bytes")
        made_of = (
            f"the pool of one run ({one / 1e6:.0f} MB) and the other adapters "
            f"({(adapters - its) / 1e6:.1f} MB)"
        )
        yield f"memory: {peak / (one + adapters - its):.2f} of {made_of} (at most {MEMORY_LIMIT:g})"


if __name__ == "__main__":
    main()
