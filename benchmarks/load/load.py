"""`make bench-load`: 200 clients beside 8 running jobs, and a daemon that has nothing to do.

    python -m benchmarks.load.load [--clients 200] [--jobs 8] [--seconds 20] [--rounds 3] [--json FILE]

Phases take turns: nobody asks, 200 clients ask. The time of a step is that of the jobs' own records. Then the
jobs are paused and the daemon is watched. Everything shares the cores of this machine, the clients too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.kit.world import World, world

SPEC = """
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 1.0e-3, steps: 100000}
rollout: {max_new_tokens: 16}
eval: {every: 0}
checkpoint: {every: 100000}
deterministic: false
"""
P99_LIMIT, SLOWER_LIMIT = 50.0, 1.05
IDLE_SHARE, IDLE_BYTES = 0.01, 120e6
Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("clients", 200), ("jobs", 8), ("seconds", 20), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with world() as made:
        found = measured(made, options)
    report(found)
    text = json.dumps(found, indent=1)
    options.json.write_text(text) if options.json else print(text)
    return int(not found["ok"])


def measured(made: World, options: argparse.Namespace) -> Found:
    runs = [f"job-{number}" for number in range(options.jobs)]
    for run in runs:
        made.lorad("run", made.spec(SPEC), f"seed={len(run)}", "--name", run, "--detach")
    for run in runs:
        made.reached(run, 3)
    daemon = psutil.Process(made.client.status().pid)
    rounds = [one_round(made, runs, options, daemon) for _ in range(options.rounds)]
    busy = share(daemon, options.seconds)
    for run in runs:
        made.lorad("pause", run)
    for run in runs:
        made.over(run)
    idle = share(daemon, options.seconds)
    quiet, asked = (statistics.median(r[key] for r in rounds) for key in ("quiet", "asked"))
    lists = [r["clients"]["list"] for r in rounds]
    errors = sum(sum(kind["errors"].values()) for r in rounds for kind in r["clients"].values())
    p99 = statistics.median(one["p99"] for one in lists)
    memory = daemon.memory_info().rss
    ok = (
        p99 < P99_LIMIT
        and not errors
        and asked / quiet < SLOWER_LIMIT
        and idle < IDLE_SHARE
        and memory < IDLE_BYTES
    )
    return {
        "rounds": rounds,
        "errors": errors,
        "list_p99": p99,
        "slower": asked / quiet,
        "ok": ok,
        "daemon_busy": busy,
        "daemon_idle": idle,
        "daemon_bytes": memory,
    }


def one_round(made: World, runs: list[str], options: argparse.Namespace, daemon: psutil.Process) -> Found:
    """Mean seconds of a step while nobody asks and while all do; what the clients saw."""
    quiet = steps_during(made, runs, lambda: time.sleep(options.seconds))
    seen: list[Found] = []
    before = sum(daemon.cpu_times()[:2])

    def ask() -> None:
        arguments = [str(made.home.socket), ",".join(runs), str(options.clients), str(options.seconds)]
        argv = [sys.executable, "-m", "benchmarks.load.load_clients", *arguments]
        seen.append(json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout))

    asked = steps_during(made, runs, ask)
    cpu = (sum(daemon.cpu_times()[:2]) - before) / options.seconds
    return {"quiet": quiet, "asked": asked, "clients": seen[0], "daemon_cpu": cpu}


def steps_during(made: World, runs: list[str], wait: Any) -> float:
    """Seconds of a step: the window, shared by all steps of all jobs that ended in it."""
    before, began = steps_of(made, runs), time.monotonic()
    wait()
    done = steps_of(made, runs) - before
    return (time.monotonic() - began) * len(runs) / done


def steps_of(made: World, runs: list[str]) -> int:
    return sum(run.step for run in made.client.list() if run.name in runs)


def share(process: psutil.Process, seconds: float) -> float:
    """Measure the share of one core that a process uses over some seconds."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return float(sum(process.cpu_times()[:2]) - before) / seconds


def report(found: Found) -> None:
    table = Table("", "seen", "limit")
    clients = found["rounds"][0]["clients"]
    for kind in ("list", "show", "logs"):
        p50, p99 = (
            statistics.median(r["clients"][kind][key] for r in found["rounds"]) for key in ("p50", "p99")
        )
        limit = f"{P99_LIMIT:.0f} ms" if kind == "list" else ""
        table.add_row(
            f"{kind}: p50, p99 ({clients[kind]['count']} a round)", f"{p50:.1f}, {p99:.1f} ms", limit
        )
    table.add_row("errors", str(found["errors"]), "0")
    table.add_row(
        "a step of the jobs, against nobody asking", f"{found['slower']:.3f} x", f"{SLOWER_LIMIT} x"
    )
    table.add_row("daemon with jobs at work and nobody asking", f"{found['daemon_busy']:.2%} of a core", "")
    table.add_row("daemon with the jobs paused", f"{found['daemon_idle']:.2%} of a core", f"{IDLE_SHARE:.0%}")
    table.add_row("daemon's memory", f"{found['daemon_bytes'] / 1e6:.0f} MB", f"{IDLE_BYTES / 1e6:.0f} MB")
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
