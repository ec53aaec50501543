"""`make bench-rewards`: 128 samples of a step, scored by graders that take their time.

    python -m benchmarks.rollout.rewards [--seconds 0.05 1] [--workers 8] [--json FILE]

Each form of a grader (a function of a sample, a coroutine, a function of lists) sleeps so long at each call;
serial is one after another in one process. The first table is the wall time from the first sample to the last
score. The second is a step of `builtin:tiny` with such a grader: seconds that sampling takes, that scoring
takes from the first sample on, and for which the step waits once sampling is over.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lorad.driver.rewards import Rewarder
from lorad.rl.reward import RewardInput
from lorad.spec.reward import RewardSpec
from tests.driver.driven import Driven
from tests.kit.pool_kit import running_pool

GRADERS = """
import asyncio, time
def sync(completion):
    time.sleep({seconds})
    return len(completion)
async def later(completion):
    await asyncio.sleep({seconds})
    return len(completion)
def lists(completions):
    time.sleep({seconds})
    return [len(c) for c in completions]
"""
GROUPS, SIZE = 16, 8
STEPS = 2


def forms(workers: int) -> dict[str, dict[str, Any]]:
    """The settings of each way to score, by its name in the tables."""
    return {
        "serial": {"name": "sync", "workers": 1},
        f"sync, {workers} workers": {"name": "sync", "workers": workers},
        "async, 1 worker": {"name": "later", "workers": 1, "concurrency": 128},
        f"batch, {workers} workers": {"name": "lists", "workers": workers},
    }


def scored(directory: Path, settings: dict[str, Any]) -> float:
    """Wall seconds for all samples, with the first process running."""
    spec = RewardSpec(**settings | {"name": f"graders.py:{settings['name']}", "timeout": 60.0})
    groups = [[RewardInput("", "x" * i, "", "stop") for i in range(SIZE)] for _ in range(GROUPS)]
    with Rewarder([spec], directory) as rewarder:
        rewarder.start()
        started = time.monotonic()
        scores = rewarder.begin(groups).scores()
        assert [s.value for s in scores] == [len(sample.completion) for group in groups for sample in group]
        return time.monotonic() - started


def stepped(directory: Path, running: Any, settings: dict[str, Any], name: str) -> dict[str, float]:
    """The second of two steps, in which processes run already."""
    reward = json.dumps(settings | {"name": f"graders.py:{settings['name']}", "timeout": 60})
    run = Driven(
        running, directory, name, f"reward={reward}", "eval.every=0", f"trainer.steps={STEPS}",
        f"algorithm.group_size={SIZE}", f"data.prompts_per_step={GROUPS}", "rollout.max_new_tokens=16",
    )  # fmt: skip
    assert run.drive().reason == "completed"
    metrics = run.facts("step")[-1].data["metrics"]
    return {key: metrics[key] for key in ("seconds_sampling", "seconds_scoring", "seconds_score", "seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.05, 1.0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = dict[str, Any]()
    for seconds in options.seconds:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            (directory / "graders.py").write_text(GRADERS.format(seconds=seconds))
            with running_pool(directory) as running:
                for number, (form, settings) in enumerate(forms(options.workers).items()):
                    alone = scored(directory, settings)
                    step = stepped(directory, running, settings, f"run{number}")
                    found[f"{seconds:g} s, {form}"] = {"alone": alone, **step}
    table = Table("grader", "128 samples", "sampling", "scoring", "waited", "step", "share of the step")
    for name, row in found.items():
        keys = ("alone", "seconds_sampling", "seconds_scoring", "seconds_score", "seconds")
        share = row["seconds_score"] / row["seconds"]
        table.add_row(name, *(f"{row[key]:.2f} s" for key in keys), f"{share:.0%}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
