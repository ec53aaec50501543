"""`make bench-rates`: learning rates times ranks of GRPO, several seeds of each in one pool, as a table and a
picture.

    python -m benchmarks.training.rates [--seeds N] [--steps N] [--of SWEEP] [--picture FILE]
        table of the held-out reward on stdout, picture of the training reward

On builtin:tiny, in a home of its own. --of reads a sweep over trainer.lr, lora.rank and seed that LORAD_HOME
has, of any base. docs/algorithms.md has what was seen.
"""

import argparse
import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.kit.plots import draw_curves
from benchmarks.training.own_share import command, fresh_home
from lorad.client.client import Client
from lorad.records.runs import Run

PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "rates.svg"
RATES, RANKS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (8, 64, 128)
SPEC = {
    "model": {"path": "builtin:tiny"},
    "algorithm": {"name": "grpo", "group_size": 8},
    "data": {"train": "sort", "prompts_per_step": 16},
    "eval": {"every": 1000, "problems": 256},
    "checkpoint": {"every": 1000},
}

Point = tuple[int, float]  # rank, rate


def main() -> None:
    parser = argparse.ArgumentParser(description="learning rates times ranks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--of", metavar="SWEEP")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    with contextlib.nullcontext() if options.of else fresh_home() as home:
        if home is not None:
            swept(home / "bench.yaml", options.seeds, options.steps)
        (sweep,) = [sweep for sweep in Client().sweeps() if sweep.sweep == (options.of or "rates")]
        made: dict[Point, list[Run]] = defaultdict(list)
        for run in sweep.runs:
            values = Client().show(run.name).spec
            made[values["lora"]["rank"], values["trainer"]["lr"]].append(run)
        print("\n".join(table(made)))
        panels = {f"rank {rank}": panel(made, rank) for rank in ranks(made)}
        draw_curves(panels, options.picture, "training reward")


def swept(file: Path, seeds: int, steps: int) -> None:
    """Run the grid, each point with all seeds."""
    file.write_text(json.dumps(SPEC | {"trainer": {"steps": steps}}))
    axes = {"trainer.lr": RATES, "lora.rank": RANKS, "seed": range(seeds)}
    grid = [f"{key}={','.join(map(str, values))}" for key, values in axes.items()]
    command("sweep", str(file), *grid, "--name", "rates", "--wait", "--json")


def ranks(made: Mapping[Point, Sequence[Run]]) -> list[int]:
    return sorted({rank for rank, _ in made})


def table(made: Mapping[Point, Sequence[Run]]) -> list[str]:
    """Return the held-out reward at the end, the mean of the seeds and the worst of them, as Markdown."""
    of_ranks = ranks(made)
    titles = [f"rank {rank}" for rank in of_ranks]
    lines = [f"| rate | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for rate in sorted({rate for _, rate in made}):
        cells = []
        for rank in of_ranks:
            scores = [run.eval_last or 0.0 for run in made[rank, rate]]
            cells.append(f"{statistics.mean(scores):.3f} ({min(scores):.3f})")
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return lines


def panel(made: Mapping[Point, Sequence[Run]], rank: int) -> dict[str, list[tuple[float, float]]]:
    """Return the training reward of each rate by step, the mean of the seeds."""
    curves = {}
    for rate in sorted(rate for of_rank, rate in made if of_rank == rank):
        by_step: dict[int, list[float]] = defaultdict(list)
        for run in made[rank, rate]:
            for step in Client().steps(run.name):
                by_step[step.step].append(step.metrics.get("reward") or 0.0)
        curves[f"{rate:g}"] = [(float(step), statistics.mean(of)) for step, of in sorted(by_step.items())]
    return curves


if __name__ == "__main__":
    main()
