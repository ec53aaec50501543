"""Measure `share`: what lorad itself costs in a real run on builtin:tiny, measured from outside.

`lorad run` with its daemon, driver, reward child and pool. From one step to a later one: all CPU time of
driver, reward child and daemon, and in the pool that of every thread but the compute thread (HTTP and JSON,
frames, digests, version files), is lorad's own; the compute thread's is sampling, training and attestation.
The attestation's part of it is the part that it has in the step's wall time, from the journal. No evals and
no checkpoints fall between.

share = own / (own + computing without attestation)
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.kit.workload import (
    ALPHA,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    RANK,
    TASK,
    Figures,
    Turn,
    play,
)
from lorad.box.paths import RunDir
from lorad.protocol.journal import Record, read
from tests.kit.leftovers import kill_leftovers

DEADLINE = 300.0  # seconds for a whole run
WARM_UP = 4
SPEC = f"""
name: bench
model: {{path: builtin:tiny}}
lora: {{rank: {RANK}, alpha: {ALPHA}}}
algorithm: {{group_size: {GROUP}}}
data: {{train: {TASK}, prompts_per_step: {PROMPTS}}}
trainer: {{lr: {LEARNING_RATE}, steps: 100000}}
rollout: {{max_new_tokens: {MAX_NEW_TOKENS}}}
eval: {{every: 0}}
checkpoint: {{every: 100000}}
"""


@dataclass(frozen=True)
class Cpu:
    """CPU seconds so far of each part, and what is resident, in MB."""

    driver: float
    daemon: float
    loop: float  # the pool's event loop
    helpers: float  # its other threads: digests, version files
    compute: float
    resident: float


def lorad(turn: Turn) -> Figures:
    with fresh_home() as home:
        (home / "bench.yaml").write_text(SPEC + f"seed: {turn.number}\n")
        command("run", str(home / "bench.yaml"), "--detach")
        run = json.loads(command("show", "bench", "--json"))
        journal = RunDir(Path(run["directory"])).journal
        began = at_step(journal, WARM_UP)
        before = look()
        ended = at_step(journal, len(began) + turn.repeats)
        after = look()
        return shares(before, after, ended[len(began) :])


def shares(before: Cpu, after: Cpu, steps: list[Record]) -> Figures:
    """CPU milliseconds of each part in a step, and the share in percent."""
    ms = {
        part: 1e3 * (getattr(after, part) - getattr(before, part)) / len(steps)
        for part in ("driver", "daemon", "loop", "helpers", "compute")
    }
    metrics = [step.data["metrics"] for step in steps]
    wall = {
        verb: sum(m.get(f"seconds_{verb}", 0.0) for m in metrics)
        for verb in ("sample", "train", "publish", "attest")
    }
    attest = ms["compute"] * wall["attest"] / (wall["sample"] + wall["train"] + wall["publish"])
    own, computing = ms["driver"] + ms["daemon"] + ms["loop"] + ms["helpers"], ms["compute"] - attest
    return {
        "own_percent": [100 * own / (own + computing)],
        "driver_ms": [ms["driver"]],
        "daemon_ms": [ms["daemon"]],
        "loop_ms": [ms["loop"]],
        "helpers_ms": [ms["helpers"]],
        "compute_ms": [computing],
        "attest_ms": [attest],
        "memory": [after.resident],
    }


def look() -> Cpu:
    """Read the CPU time of the daemon and of its only run."""
    run = json.loads(command("show", "bench", "--json"))
    found = {process["role"]: psutil.Process(process["pid"]) for process in run["processes"]}
    daemon = psutil.Process(json.loads(command("daemon", "status", "--json"))["pid"])
    driver = [found["driver"], *found["driver"].children(recursive=True)]
    pool = found["pool"]
    loop, compute = main_and_busiest_thread(pool)
    return Cpu(
        driver=sum(map(cpu_seconds, driver)),
        daemon=cpu_seconds(daemon),
        loop=loop,
        helpers=cpu_seconds(pool) - loop - compute,
        compute=compute,
        resident=sum(process.memory_info().rss for process in (*driver, daemon, pool)) / 2**20,
    )


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main_and_busiest_thread(process: psutil.Process) -> tuple[float, float]:
    """CPU seconds of the main thread, and of the pool's compute thread: no other one works as much."""
    tasks = Path(f"/proc/{process.pid}/task")
    seconds = {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}
    main = seconds.pop(str(process.pid))
    return main, max(seconds.values())


def at_step(journal: Path, count: int) -> list[Record]:
    """The steps in the journal as soon as there are so many."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        records = [record for record, _ in read(journal)] if journal.exists() else []
        if ended := [record for record in records if record.kind == "end"]:
            raise SystemExit(f"the run ended early: {ended[-1].data}")
        if len(steps := [record for record in records if record.kind == "step"]) >= count:
            return steps
        time.sleep(0.2)
    raise SystemExit(f"the run did not reach step {count} in {DEADLINE:.0f} s")


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lorad", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"lorad {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


@contextmanager
def fresh_home() -> Iterator[Path]:
    """A LORAD_HOME of its own, whose processes are killed at the end."""
    with tempfile.TemporaryDirectory(prefix="lr-", ignore_cleanup_errors=True) as directory:
        os.environ["LORAD_HOME"] = directory
        try:
            yield Path(directory)
        finally:
            kill_leftovers(Path(directory))


if __name__ == "__main__":
    play({"lorad": lorad})
