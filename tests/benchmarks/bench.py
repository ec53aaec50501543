"""`make bench`: lorad against TRL + PEFT on the builtin tiny model, in CPU time, one thread, A B A B.

    python -m tests.benchmarks.bench [--rounds N] [--repeats N]     table on stderr, JSON on stdout

Every turn is a process of its own, and the sides take turns, so that a busy neighbour slows both alike. Compare the
ratios: the seconds belong to this machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.workload import FORCED_TOKENS, GROUP, MAX_NEW_TOKENS, PROMPTS

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"lorad": "tests.benchmarks.ours", "trl": "tests.benchmarks.peers", "whole": "tests.benchmarks.whole"}
MEASURES = {"step": ("lorad", "trl", "whole"), "rollout": ("lorad", "trl")}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

Turn = dict[str, Any]  # one Report, as its process printed it


def main() -> None:
    options = parse()
    turns = take_turns(options.rounds, options.repeats)
    result = {"machine": machine(), "workload": workload(options), "rows": rows(turns), "turns": turns}
    show(result)
    print(json.dumps(result, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="lorad against TRL + PEFT, in CPU time of one thread")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    parser.add_argument("--repeats", type=int, default=12, help="counted steps or calls in a turn (default 12)")
    return parser.parse_args()


def take_turns(rounds: int, repeats: int) -> list[Turn]:
    """A B A B: every round measures each side once."""
    turns: list[Turn] = []
    for measure, sides in MEASURES.items():
        for number in range(rounds):
            for side in sides:
                print(f"{measure}: round {number + 1} of {rounds}, {side}", file=sys.stderr)
                turns.append({"measure": measure, **take_turn(side, measure, repeats)})
    return turns


def take_turn(side: str, measure: str, repeats: int) -> Turn:
    command = [sys.executable, "-m", SIDES[side], measure, str(repeats)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the {side} side failed:\n{done.stderr[-4000:]}")
    report: Turn = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def rows(turns: list[Turn]) -> list[dict[str, Any]]:
    """One row for each thing measured: the median of both sides over all turns, and how many times better lorad is."""
    return [
        row(turns, "step", "GRPO step, CPU ms", lambda t: [1e3 * s for s in t["step_seconds"]]),
        row(turns, "step", "  its rollout, CPU ms", lambda t: [1e3 * s for s in t["rollout_seconds"]]),
        row(turns, "step", "  the rest, CPU ms", rest),
        row(turns, "step", "  peak RSS, MB", lambda t: [t["peak_rss_mb"]]),
        row(turns, "step", "  mean reward, all steps", lambda t: [statistics.mean(t["rewards"])], smaller=False),
        row(turns, "step", "step of a real run, CPU ms", lambda t: [1e3 * s for s in t["step_seconds"]], ours="whole"),
        row(turns, "rollout", "rollout, tokens per CPU-s", lambda t: t["tokens_per_second"], smaller=False),
        row(turns, "rollout", "  peak RSS, MB", lambda t: [t["peak_rss_mb"]]),
    ]


def rest(turn: Turn) -> list[float]:
    pairs = zip(turn["step_seconds"], turn["rollout_seconds"], strict=True)
    return [1e3 * (step - rollout) for step, rollout in pairs]


def row(
    turns: list[Turn],
    measure: str,
    what: str,
    values: Callable[[Turn], list[float]],
    *,
    smaller: bool = True,
    ours: str = "lorad",
) -> dict[str, Any]:
    def median(side: str) -> float:
        mine = (turn for turn in turns if turn["measure"] == measure and turn["side"] == side)
        return statistics.median(value for turn in mine for value in values(turn))

    lorad, trl = median(ours), median("trl")
    return {"what": what, "lorad": lorad, "trl": trl, "ratio": trl / lorad if smaller else lorad / trl}


def workload(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "step": f"{PROMPTS} prompts x {GROUP}, at most {MAX_NEW_TOKENS} new tokens",
        "rollout": f"{PROMPTS} prompts x {GROUP}, {FORCED_TOKENS} new tokens each",
        "rounds": options.rounds,
        "repeats": options.repeats,
    }


def machine() -> dict[str, str]:
    """What the seconds belong to."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "trl")}
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **packages,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title="lorad against TRL + PEFT, builtin:tiny, one thread (median; ratio: times better)")
    table.add_column("")
    for name in ("lorad", "TRL", "ratio"):
        table.add_column(name, justify="right")
    for line in result["rows"]:
        table.add_row(line["what"], number(line["lorad"]), number(line["trl"]), f"{line['ratio']:.2f}x")
    console = Console(stderr=True)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()), soft_wrap=True)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    main()
