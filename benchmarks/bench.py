"""`make bench`: lorad against its peers and against the machine's limits, in CPU time, one thread, A B A B.

    python -m benchmarks.bench [--rounds N] [--repeats N] [--only NAME,…] [--keep FILE]
        rows on stderr as they are measured, the table of all at the end; JSON on stdout

Every turn is a process of its own, and the sides take turns, so that a busy neighbour slows both alike.
Compare the ratios: the seconds belong to this machine.

--keep: each turn is written there when it is over. Those of this CPU that are there already are not measured
again, so a bench that was broken off goes on.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.models import make
from benchmarks.rows import MEASURES, ROWS, Measure, Row
from benchmarks.table import show
from lorad.box.machine import cpu_facts

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # glibc gives pages back and faults them in again: slows every side
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

TURN_SECONDS = 900  # at most; bfloat16 on a CPU without means for it takes longer
Turn = dict[str, Any]  # what one process printed, and of which measure and round it is


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="lorad-bench-") as models:
        turns = take_turns(options, Path(models))
    result = {
        "machine": machine(),
        "rounds": options.rounds,
        "repeats": options.repeats,
        "rows": [line(row, turns) for row in ROWS if row.measure in options.only],
        "turns": turns,
    }
    show(result, "all")
    print(json.dumps(result, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="lorad against its peers, in CPU time of one thread")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    parser.add_argument(
        "--repeats", type=int, default=8, help="counted steps or calls in a turn; slow ones fewer"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="turns as JSON lines, to go on from")
    parser.add_argument(
        "--only", default=",".join(MEASURES), help="of: %(default)s; the beginning of names names several"
    )
    options = parser.parse_args()
    words = options.only.split(",")
    # a whole name names itself alone: decode-bf16 takes a quarter of an hour where decode takes a minute
    named = {
        word: [word] if word in MEASURES else [name for name in MEASURES if name.startswith(word)]
        for word in words
    }
    options.only = [name for name in MEASURES if any(name in names for names in named.values())]
    if unknown := [word for word, names in named.items() if not names]:
        parser.error(f"there is no measure {', '.join(unknown)}; choose from {', '.join(MEASURES)}")
    return options


def take_turns(options: argparse.Namespace, models: Path) -> list[Turn]:
    """A B A B: every round measures each side once."""
    turns = kept_turns(options)
    for name in options.only:
        measure = MEASURES[name]
        for model in measure.models:
            make(model, models)
        for number in range(options.rounds):
            for side in measure.sides:
                where = {"measure": name, "side": side, "round": number, "cpu": machine()["cpu"]}
                if any(where.items() <= turn.items() for turn in turns):
                    continue
                print(f"{name}: round {number + 1} of {options.rounds}, {side}", file=sys.stderr)
                turns.append(take_turn(measure, side, number, options.repeats, models) | where)
                if options.keep:
                    with options.keep.open("a") as file:
                        file.write(json.dumps(turns[-1]) + "\n")
        show({"rows": [line(row, turns) for row in ROWS if row.measure == name], "machine": machine()}, name)
    return turns


def kept_turns(options: argparse.Namespace) -> list[Turn]:
    """Read the turns of a bench that was broken off, on this CPU and of the rounds that are asked for."""
    if not options.keep or not options.keep.exists():
        return []
    turns: list[Turn] = [json.loads(text) for text in options.keep.read_text().splitlines()]
    return [turn for turn in turns if turn["cpu"] == machine()["cpu"] and turn["round"] < options.rounds]


def take_turn(measure: Measure, side: str, number: int, repeats: int, models: Path) -> Turn:
    """Measure one side in a process of its own. Raises SystemExit where it fails or takes too long."""
    counted = max(1, round(repeats * measure.repeats))
    command = [sys.executable, "-m", *measure.command(side), "--round", str(number)]
    try:
        done = subprocess.run(
            [*command, "--repeats", str(counted), "--models", str(models)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=TURN_SECONDS,
        )
    except subprocess.TimeoutExpired:
        late = f"the {side} side of {measure.module} {measure.case} took over {TURN_SECONDS} s"
        raise SystemExit(f"{late}: leave it out by --only, or ask for fewer --repeats") from None
    if done.returncode != 0:
        raise SystemExit(f"the {side} side of {measure.module} failed:\n{done.stderr[-4000:]}")
    report: Turn = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def line(row: Row, turns: list[Turn]) -> dict[str, Any]:
    """One row with its numbers: medians over all turns, the highest peak of memory."""
    lorad, ours = figure(turns, row.measure, "lorad", row.lorad)
    peer, theirs = figure(turns, row.measure, row.peer_side, row.peer) if row.peer else (None, None)
    lorad, peer = lorad / row.unit, None if peer is None else peer / row.unit
    ratio = row.ratio(lorad, peer)
    return {
        "what": row.what,
        "judgement": row.judgement,
        "peer_name": row.peer_name,
        "peer": peer,
        "lorad": lorad,
        "ratio": ratio,
        "target": row.target,
        "stretch": row.stretch,
        "reached": row.reached(lorad, ratio, row.target),
        "stretch_reached": row.reached(lorad, ratio, row.stretch),
        "peak_mb": ours,
        "peer_peak_mb": theirs if row.peer_side == "peer" else None,
    }


def figure(turns: list[Turn], measure: str, side: str, name: str) -> tuple[float, float]:
    """(median over all repetitions of all rounds, peak MB)."""
    mine = [turn for turn in turns if turn["measure"] == measure and turn["side"] == side]
    values = [value for turn in mine for value in turn["figures"][name]]
    return statistics.median(values), max(turn["peak_rss_mb"] for turn in mine)


def machine() -> dict[str, str]:
    """What the seconds belong to."""
    cpu = cpu_facts().get("model name") or platform.processor()
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "trl")}
    return {
        "cpu": f"{cpu} {torch.backends.cpu.get_cpu_capability()}",
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **packages,
    }


if __name__ == "__main__":
    main()
