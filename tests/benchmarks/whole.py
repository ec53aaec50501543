"""A real run, measured from outside: `lorad run`, its pool and its driver, with journal and attestation.

What counts is the CPU time of both processes from one step to a later one, divided by the steps between them. There are
no evals in between, and the only checkpoint is at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import lorad
from tests.benchmarks.workload import (
    ALPHA,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    RANK,
    TASK,
    WARM_UP,
    Report,
    arguments,
)
from tests.leftovers import kill_leftovers

DEADLINE = 300.0  # seconds for a whole run
SPEC = f"""
name: bench
model: {{path: builtin:tiny}}
lora: {{rank: {RANK}, alpha: {ALPHA}}}
algorithm: {{group_size: {GROUP}}}
data: {{train: {TASK}, prompts_per_step: {PROMPTS}}}
trainer: {{lr: {LEARNING_RATE}}}
rollout: {{max_new_tokens: {MAX_NEW_TOKENS}}}
eval: {{every: 0}}
checkpoint: {{every: 100000}}
"""


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "lorad", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"lorad {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def show() -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(command("show", "bench", "--json"))
    return shown


@contextmanager
def fresh_home() -> Iterator[Path]:
    """A LORAD_HOME of its own, whose processes are killed at the end."""
    with tempfile.TemporaryDirectory(prefix="lr-", ignore_cleanup_errors=True) as directory:
        os.environ["LORAD_HOME"] = directory
        try:
            yield Path(directory)
        finally:
            kill_leftovers(Path(directory))


def workers(run: dict[str, Any]) -> list[psutil.Process]:
    """The processes of a run and their children: the pool, the driver, the reward's."""
    own = [psutil.Process(process["pid"]) for process in run["processes"]]
    return [*{worker for process in own for worker in (process, *process.children(recursive=True))}]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def at_step(first: int) -> tuple[int, float, float]:
    """(step, CPU seconds so far, resident MB) of the run as soon as it has done `first` steps."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        run = show()
        if run["state"] == "ended":
            raise SystemExit(f"the run ended early: {run['reason']}")
        if run["step"] >= first:
            processes = workers(run)
            resident = sum(process.memory_info().rss for process in processes) / 1e6
            return run["step"], cpu_seconds(processes), resident
        time.sleep(0.2)
    raise SystemExit(f"the run did not reach step {first} in {DEADLINE:.0f} s")


def main() -> None:
    _, count = arguments()
    with fresh_home() as home:
        (home / "bench.yaml").write_text(SPEC)
        command("run", str(home / "bench.yaml"), "trainer.steps=100000", "--detach")
        began, used, _ = at_step(WARM_UP)
        ended, used_then, resident = at_step(began + count)
        report = Report("whole", lorad.__version__, step_seconds=[(used_then - used) / (ended - began)])
        report.peak_rss_mb = resident
        report.print()


if __name__ == "__main__":
    main()
