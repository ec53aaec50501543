"""`make bench-algorithms`: lorad's algorithms beside TRL's, on builtin:tiny and the same prompts.

    python -m benchmarks.training.algorithms [--seeds N] [--steps N] [--only NAME,…]
        table on stderr, JSON on stdout

lorad's side is `lorad run` in a home of its own: daemon, driver, reward child and pool, with attestation.
CPU is of all these processes over the steps in the middle, times the number of steps; the peer's is of its
process over its steps but the first. Starting, evaluating and checkpointing count on neither side. Memory is
the peak of the peer's process, and the sum of the peaks of lorad's, which counts what they share several
times. The sides take turns. Another pair is a line of `pairs.py` and, for another trainer of the peer, a
function of PEERS.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench import ENVIRONMENT, ROOT
from benchmarks.kit.workload import PROMPTS, TASK, Figures, held_out
from benchmarks.training.own_share import at_step, command, fresh_home
from benchmarks.training.pairs import PAIRS, ROWS, Pair, rows_of, spec_of
from lorad.box.paths import RunDir
from lorad.rl.tasks import problem

MARGIN = 2  # steps at both ends that are not counted on lorad's side
MOST = 0.5  # of the peer's CPU time


@dataclass(frozen=True)
class Outcome:
    """What one turn came to.

    score: greedy on held-out problems, at the end. cpu: seconds of its steps. memory: its peak in MB.
    """

    score: float
    cpu: float
    memory: float


def trl_grpo(pair: Pair, steps: int, seed: int) -> Figures:
    from benchmarks.kit.peers import trl_steps

    problems = [problem(TASK, "train", seed, index) for index in range(steps * PROMPTS)]
    return trl_steps(problems, steps, seed, held_out(), **pair.settings)


def trl_on_rows(pair: Pair, steps: int, seed: int) -> Figures:
    from benchmarks.kit.peers import trl_on_rows

    rows = rows_of(pair.columns, steps, seed)
    return trl_on_rows(pair.name.lower(), rows, steps, seed, held_out(), **pair.settings)


# by the trainer of a pair; the arguments are the pair, steps and seed
PEERS: Mapping[str, Callable[[Pair, int, int], Figures]] = {
    "TRL GRPOTrainer": trl_grpo,
    "TRL SFTTrainer": trl_on_rows,
    "TRL DPOTrainer": trl_on_rows,
}


def main() -> None:
    options = parse()
    if options.peer is not None:  # a turn of the peer, in a process of its own
        print(json.dumps(asdict(turn_of_peer(PAIRS[options.peer], options.steps, options.first))))
        return
    rows = [
        measured(number, options)
        for number, pair in enumerate(PAIRS)
        if any(pair.name.lower().startswith(wanted.strip().lower()) for wanted in options.only.split(","))
    ]
    show(rows)
    print(json.dumps({"steps": options.steps, "rows": rows}, indent=2))
    if above := [row["name"] for row in rows if row["ratio"] > MOST]:
        raise SystemExit(f"lorad took more of the peer's CPU time than it may: {', '.join(above)}")


def turn_of_peer(pair: Pair, steps: int, seed: int) -> Outcome:
    figures = PEERS[pair.trainer](pair, steps, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Outcome(figures["eval"][0], statistics.mean(figures["step"][1:]) * steps, peak)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="lorad's algorithms beside TRL's")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--peer", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table: means over seeds; the highest peaks."""
    pair, turns = PAIRS[number], {"lorad": list[Outcome](), "peer": list[Outcome]()}
    for seed in range(options.first, options.first + options.seeds):
        turns["lorad"].append(lorad(pair, options.steps, seed))
        turns["peer"].append(peer(number, options.steps, seed))
        print(f"{pair.name}, seed {seed}: {turns['lorad'][-1]} {turns['peer'][-1]}", file=sys.stderr)
    sides: dict[str, dict[str, Any]] = {
        side: {
            "scores": [one.score for one in of],
            "cpu": statistics.mean(one.cpu for one in of),
            "memory": max(one.memory for one in of),
        }
        for side, of in turns.items()
    }
    ratio = sides["lorad"]["cpu"] / sides["peer"]["cpu"]
    return {"name": pair.name, "trainer": pair.trainer, **sides, "ratio": ratio}


def peer(number: int, steps: int, seed: int) -> Outcome:
    wanted = ["--peer", str(number), "--steps", str(steps), "--first", str(seed)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training.algorithms", *wanted],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{PAIRS[number].trainer} failed:\n{done.stderr[-4000:]}")
    return Outcome(**json.loads(done.stdout.strip().splitlines()[-1]))


def lorad(pair: Pair, steps: int, seed: int) -> Outcome:
    with fresh_home() as home:
        (home / "bench.yaml").write_text(json.dumps(spec_of(pair, steps, seed)))
        rows = rows_of(pair.columns, steps, seed) if pair.columns else []
        (home / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        command("run", str(home / "bench.yaml"), "--detach")
        journal = RunDir(Path(json.loads(command("show", "bench", "--json"))["directory"])).journal
        began = len(at_step(journal, MARGIN))
        before, _ = spent(home)
        ended = len(at_step(journal, steps - MARGIN))
        after, memory = spent(home)
        if ended <= began:
            raise SystemExit(f"{steps} steps are too few to measure")
        return Outcome(final_score(), (after - before) / (ended - began) * steps, memory)


def spent(home: Path) -> tuple[float, float]:
    """(CPU seconds, the sum of peaks in MB) of all processes of a home."""
    seconds = peaks = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get("LORAD_HOME") == str(home) and process.pid != os.getpid():
                times, status = process.cpu_times(), Path(f"/proc/{process.pid}/status").read_text()
                seconds += times.user + times.system
                peaks += int(status.partition("VmHWM:")[2].split()[0]) / 1024
        except (psutil.Error, OSError, IndexError):  # it ended
            continue
    return seconds, peaks


def final_score() -> float:
    while (run := json.loads(command("show", "bench", "--json")))["state"] != "ended":
        time.sleep(0.5)
    if run["reason"] != "completed":
        raise SystemExit(f"the run ended early: {run['detail']}")
    return float(run["eval_last"])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out greedy score at the end, CPU seconds of the steps, peak MB")
    table.add_column("")
    for name in ("peer", "its score", "lorad's", "its CPU s", "lorad's", "ratio", "its MB", "lorad's"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for row in rows:
        ours, theirs = row["lorad"], row["peer"]
        table.add_row(
            row["name"],
            row["trainer"],
            with_error(theirs["scores"]),
            with_error(ours["scores"]),
            f"{theirs['cpu']:.1f}",
            f"{ours['cpu']:.1f}",
            f"{row['ratio']:.2f}",
            f"{theirs['memory']:.0f}",
            f"{ours['memory']:.0f}",
        )
    Console(stderr=True, width=120).print(table)


def with_error(values: Sequence[float]) -> str:
    """The mean with its standard error, where there are several."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


if __name__ == "__main__":
    main()
