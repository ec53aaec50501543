"""`make bench-split`: a run whose servers have devices of their own, beside the same run on one device.

    python -m benchmarks.training.split [--kind vllm] [--steps 12] [--rounds 2] [--json FILE]

Two ranks of FSDP train and two real servers sample, on four slots of a CPU, which stand in for GPUs, or on
one. Each has a pool that stays warm, and they take turns. The slots share the CPU's cores: what the table
compares is how the parts of a step lie in time, and what the mode itself costs.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lorad.protocol.journal import Record, lineage, read
from tests.kit.world import World, world
from tests.trainers.real.pairs import configured

_SPEC = """
seed: 5
lora: {rank: 8}
algorithm: {group_size: 8}
data: {train: sort, prompts_per_step: 8}
trainer: {backend: fsdp, dp: 2, lr: 1.0e-3}
rollout: {servers: 2, max_new_tokens: 12}
eval: {every: 0}
checkpoint: {every: 1000}
"""
_SLOTS = {"resident": 1, "split": 4}
_WAYS = {
    "resident": ("resident", 0),
    "resident, ahead": ("resident", 1),
    "split, ahead": ("split", 1),
}
"""The mode, and how many steps sampling may run ahead."""
_UNSETTLED = 3  # steps that are not counted: the first ones sample nothing ahead, and warm up
_WIDTH = 72  # characters of a timeline


class Stepped(NamedTuple):
    """When a step was sampled, trained and published, Unix seconds (begin, end).

    together: seconds that its training and publishing had with sampling of any step.
    waited: seconds that the loop waited for its samples.
    """

    step: int
    sampled: tuple[float, float]
    trained: tuple[float, float]
    published: tuple[float, float]
    together: float
    waited: float


def timeline(records: Sequence[Record]) -> list[Stepped]:
    """Tell when the parts of each step were, by what the journal says.

    Samples are made one step after another, each as soon as the version that makes them is there; a version's
    record is written when it has been published, and publishing follows training.
    """
    facts = lineage([*records])
    begun = dict[int, float]()  # of versions, or of steps without; a resume publishes one again
    for record in facts:
        if record.kind in ("step", "version"):
            begun.setdefault(record.step, record.at)
    steps = [r for r in facts if r.kind == "step"]
    sampled = dict[int, tuple[float, float]]()
    last = 0.0
    for record in facts:
        if record.kind == "attempt":
            last = record.at
        if record.kind == "step":
            metrics = record.data["metrics"]
            begin = max(last, begun[max(0, record.step - 1 - int(metrics["staleness"]))])
            last = begin + metrics["seconds_sampling"]
            sampled[record.step] = begin, last
    parts = []
    for record in steps:
        metrics = record.data["metrics"]
        end = begun[record.step]
        trained = end - metrics.get("seconds_publish", 0.0)
        whole = trained - metrics["seconds_train"], end
        together = sum(max(0.0, min(whole[1], to) - max(whole[0], of)) for of, to in sampled.values())
        parts.append(
            Stepped(
                record.step,
                sampled[record.step],
                (whole[0], trained),
                (trained, end),
                together,
                metrics["seconds_sample"],
            )
        )
    return parts


def seconds_a_step(parts: Sequence[Stepped]) -> float:
    """Return the wall time of a step, as the mean of those that are settled."""
    return (parts[-1].published[1] - parts[_UNSETTLED - 1].published[1]) / (len(parts) - _UNSETTLED)


def picture(parts: Sequence[Stepped]) -> Iterator[str]:
    """Draw settled steps, a line each, as far as a line reaches: s sampling, T training, p publishing."""
    shown = parts[_UNSETTLED : _UNSETTLED + 6]
    begin = min(part.sampled[0] for part in shown)
    scale = _WIDTH / (shown[-1].published[1] - begin)
    for part in shown:
        line = [" "] * _WIDTH
        for letter, (of, to) in zip("sTp", (part.sampled, part.trained, part.published), strict=True):
            first = int((of - begin) * scale)
            last = max(first + 1, round((to - begin) * scale))
            line[first:last] = letter * (min(last, _WIDTH) - first)
        yield f"step {part.step:3}  {''.join(line[:_WIDTH])}".rstrip()
    yield f"          {1 / scale:.2f} s a letter"


def _measured(made: World, way: str, turn: int, options: argparse.Namespace) -> list[Stepped]:
    mode, ahead = _WAYS[way]
    name = f"{mode}-{ahead}-{turn}"
    how = (f"rollout.backend={options.kind}", f"pool.mode={mode}", f"rollout.max_staleness={ahead}")
    made.lorad("run", made.spec(_SPEC), *how, f"trainer.steps={options.steps}", "--name", name, "--detach")
    made.completed(name)
    return timeline([record for record, _ in read(made.home.run(name).journal)])


def _table(found: dict[str, list[list[Stepped]]], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.kind}: each turn, and medians of settled steps, seconds")
    columns = ("a step", "of the first", "sampling", "waited for it", "training, publishing", "both at once")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    first = next(iter(found.values()))
    for way, turns in found.items():
        steps = [part for parts in turns for part in parts[_UNSETTLED:]]
        each = [seconds_a_step(parts) for parts in turns]
        ratios = [a / seconds_a_step(b) for a, b in zip(each, first, strict=True)]
        figures = (
            [part.sampled[1] - part.sampled[0] for part in steps],
            [part.waited for part in steps],
            [part.published[1] - part.trained[0] for part in steps],
            [part.together for part in steps],
        )
        table.add_row(
            way,
            ", ".join(f"{seconds:.2f}" for seconds in each),
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
            *(f"{statistics.median(values):.2f}" for values in figures),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="servers on devices of their own")
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each way")
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args()
    found: dict[str, list[list[Stepped]]] = {way: [] for way in _WAYS}
    with contextlib.ExitStack() as stack:
        worlds = {mode: stack.enter_context(world()) for mode in _SLOTS}
        for mode, made in worlds.items():
            made.home.root.mkdir(parents=True)
            config = {"devices": {"cpu_slots": _SLOTS[mode]}, "backends": configured(options.kind)}
            made.home.config.write_text(json.dumps(config))  # YAML has JSON in it
        for turn in range(options.rounds):
            for way, (mode, _) in _WAYS.items():
                print(f"round {turn + 1} of {options.rounds}: {way}", file=sys.stderr)
                found[way].append(_measured(worlds[mode], way, turn, options))
    console = Console(width=110)
    for way in ("resident, ahead", "split, ahead"):
        console.print(f"\n{way}: sampling (s), training (T), publishing (p)", highlight=False)
        for line in picture(found[way][-1]):
            console.print(line, highlight=False)
    console.print(_table(found, options))
    console.print(f"load when it ended: {os.getloadavg()[0]:.1f}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
