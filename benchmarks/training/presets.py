"""`make bench-presets`: learning curves of all algorithms on builtin:tiny, as a picture and as a table.

    python -m benchmarks.training.presets [--seeds N] [--steps N]
        table on stderr, JSON on stdout, picture in examples/pictures

Sweeps in a home of their own: one update a step, two epochs of four minibatches, and what learns from
completions, pairs or a teacher instead of a reward. Scores are greedy on 256 held-out problems, means over
seeds. It fails where an algorithm is below what its plumbing should give
(LEAST). Curves find faults of the plumbing; a wrong scale of the loss only the goldens find
(tests/rl/test_goldens.py).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.kit.plots import draw_curves
from benchmarks.training.own_share import command, fresh_home
from benchmarks.training.pairs import PAIRS, ROWS, rows_of, spec_of
from lorad.client.client import Client
from lorad.spec.algorithm import PRESETS

PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "algorithms.svg"
EVERY = 5  # steps between two evaluations
OTHERS = ("distill", "custom")  # they have a teacher, and functions of the user
ON_ROWS = ("sft", "dpo")
OFF_POLICY = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce", "gspo", "gmpo", "cispo", "sapo", "dppo", "ppo")
UPDATES = ["algorithm.epochs=2", "algorithm.minibatches=4"]
LEAST = {  # score at this step
    "one update a step": (30, 0.9),
    "2 epochs of 4 minibatches": (20, 0.75),
    "answers, pairs, a teacher": (30, 0.85),
}

Curve = Mapping[int, float]  # step -> score


def main() -> None:
    parser = argparse.ArgumentParser(description="learning curves of all algorithms")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    on_policy, off_policy, taught = LEAST
    with fresh_home() as home:
        file = home / "bench.yaml"
        spec = spec_of(PAIRS[0], options.steps, 0)
        spec["algorithm"] = {"group_size": spec["algorithm"]["group_size"]}
        file.write_text(json.dumps(spec | {"eval": {"every": EVERY, "problems": 256}}))
        names = [name for name in PRESETS if name not in OTHERS]
        panels = {
            on_policy: swept(file, "on", names, options.seeds),
            off_policy: swept(file, "off", OFF_POLICY, options.seeds, UPDATES),
            taught: on_rows(home, options.steps, options.seeds)
            | swept(file, "distill", ["distill"], options.seeds, [f"algorithm.kl.reference={teacher()}"]),
        }
    draw_curves({title: {n: [*c.items()] for n, c in of.items()} for title, of in panels.items()}, PICTURE)
    print(json.dumps(panels))
    if missed := [line for title in panels for line in show(title, panels[title])]:
        raise SystemExit("\n".join(missed))


def swept(
    file: Path, title: str, names: Sequence[str], seeds: int, more: Sequence[str] = ()
) -> dict[str, Curve]:
    """The mean curve of each algorithm."""
    grid = [f"algorithm.name={','.join(names)}", f"seed={','.join(map(str, range(seeds)))}"]
    axes = [axis for axis in grid if "," in axis]
    given = [axis for axis in grid if "," not in axis]
    made = json.loads(command("sweep", str(file), *axes, *given, *more, "--name", title, "--wait", "--json"))
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    client = Client()
    for run in made["runs"]:
        if run["reason"] != "completed":
            raise SystemExit(f"{run['name']} ended early: {run['detail']}")
        for found in client.evals(run["name"]):
            if found.score is not None:
                curves[run["values"].get("algorithm.name", names[0])].setdefault(found.step, []).append(
                    found.score
                )
    return {name: {step: statistics.mean(of) for step, of in curve.items()} for name, curve in curves.items()}


def on_rows(home: Path, steps: int, seeds: int) -> dict[str, Curve]:
    """The mean curves of what learns from rows, on those of `make bench-algorithms`."""
    curves = dict[str, Curve]()
    for pair in PAIRS:
        if (name := pair.name.lower()) in ON_ROWS:
            file = home / f"{name}.yaml"
            rows = rows_of(pair.columns, steps, 0)
            (home / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
            file.write_text(json.dumps(spec_of(pair, steps, 0) | {"eval": {"every": EVERY, "problems": 256}}))
            curves |= swept(file, name, [name], seeds)
    return curves


def teacher() -> str:
    """The last version of the first run of grpo."""
    (sweep,) = Client().sweeps("on")
    return f"{sweep.runs[0].name}@{sweep.runs[0].version}"


def show(title: str, curves: Mapping[str, Curve]) -> list[str]:
    """Print the curves; what is below the least."""
    at, least = LEAST[title]
    steps = sorted(next(iter(curves.values())))
    print(f"{title}\n{'':22}" + "".join(f"{step:>7}" for step in steps), file=sys.stderr)
    for name, curve in curves.items():
        print(f"{name:22}" + "".join(f"{curve[step]:7.3f}" for step in steps), file=sys.stderr)
    if at not in steps:
        return []
    return [f"{name}: {c[at]:.3f} at step {at}, least {least}" for name, c in curves.items() if c[at] < least]


if __name__ == "__main__":
    main()
