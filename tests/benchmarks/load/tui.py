"""`make bench-tui`: what `lorad tui` costs in a real pseudo-terminal of 160x50, beside live runs and a long
history.

    python -m tests.benchmarks.load.tui [--live 8] [--runs 1000] [--seconds 30] [--keys 200] [--rounds 5]
        [--json FILE]

A first paint lasts from exec to the end of the first frame that names a run: what `lorad top` says, until the
screens stand, which is reported separately. A key is answered when the frame arrived that shows the command
for the next row. Both are wall time, beside the runs that train on the same cores; what these and others take
shows in how much later than asked for a sleeper wakes up.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.benchmarks.load.history import fill
from tests.benchmarks.load.load import SPEC
from tests.benchmarks.load.terminal import FRAME, Terminal
from tests.kit.world import World, world

STEPS = 50  # of each run that ended
CPU_LIMIT, PAINT_LIMIT, KEY_LIMIT = 0.10, 0.6, 0.050  # of a core; seconds; seconds, p95
NAMED = b"job-"  # the beginning of a live run's name
COMMAND = b"lorad show "
Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("live", 8), ("runs", 1000), ("seconds", 30), ("keys", 200), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with world() as made:
        fill(made, options.runs, STEPS)
        start(made, options.live)
        found = measured(made, options)
    report(found)
    text = json.dumps(found, indent=1)
    options.json.write_text(text) if options.json else print(text)
    return int(not found["ok"])


def start(made: World, live: int) -> None:
    names = [f"job-{number}" for number in range(live)]
    for number, name in enumerate(names):
        made.lorad("run", made.spec(SPEC), f"seed={number}", "--name", name, "--detach")
    for name in names:
        made.reached(name, 3)


def measured(made: World, options: argparse.Namespace) -> Found:
    paints, bare = [], []
    for _ in range(options.rounds):
        bare.append(python_start())
        paints.append(first_paint(made))
    with dashboard(made) as terminal:
        calm = watched(terminal, made, options.seconds)
        answered = keys(terminal, options.keys)
    p50, p95 = (statistics.quantiles(answered["seconds"], n=20)[rank] for rank in (9, 18))
    paint = statistics.median(one["seconds"] for one in paints)
    return {
        "load": os.getloadavg()[0],
        "live": options.live,
        "ended": options.runs,
        "paint": paint,
        "stands": statistics.median(one["stands"] for one in paints),
        "stands_cpu": statistics.median(one["cpu"] for one in paints),
        "paint_times_python": paint / statistics.median(bare),
        "paints": paints,
        "key_p50": p50,
        "key_p95": p95,
        "keys_missed": answered["missed"],
        "key_cpu": max(answered["cpu"] - calm["cpu"] * answered["lasted"], 0.0) / options.keys,
        "wakes_later": late(200),
        **calm,
        "ok": calm["cpu"] < CPU_LIMIT and paint < PAINT_LIMIT and p95 < KEY_LIMIT and not answered["missed"],
    }


@contextmanager
def dashboard(made: World) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-m", "lorad", "tui"], made.home.root)
    try:
        yield terminal
    finally:
        terminal.close()


def python_start() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


def first_paint(made: World) -> Found:
    with dashboard(made) as terminal:
        painted, stands = terminal.shown(NAMED), terminal.shown(COMMAND)
        assert painted and stands, f"no run was shown:\n{terminal.data.decode(errors='replace')}"
        used = cpu(psutil.Process(terminal.process.pid))
        return {"seconds": painted - terminal.began, "stands": stands - terminal.began, "cpu": used}


def watched(terminal: Terminal, made: World, seconds: float) -> Found:
    """While nobody touches it."""
    assert terminal.shown(COMMAND) is not None, terminal.data.decode(errors="replace")
    time.sleep(2.0)
    processes = [psutil.Process(pid) for pid in (terminal.process.pid, made.client.status().pid)]
    before, began, steps = [cpu(one) for one in processes], len(terminal.data), steps_of(made)
    time.sleep(seconds)
    shares = [(cpu(one) - first) / seconds for one, first in zip(processes, before, strict=True)]
    drawn = terminal.data[began:]
    return {
        "cpu": shares[0],
        "daemon_cpu": shares[1],
        "bytes": len(drawn) / seconds,
        "frames": drawn.count(FRAME) / seconds,
        "steps": (steps_of(made) - steps) / seconds,
        "memory": processes[0].memory_info().rss,
    }


def cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def steps_of(made: World) -> int:
    return sum(run.step for run in made.client.list())


def keys(terminal: Terminal, count: int) -> Found:
    """Four rows down and four up again, at moments that have nothing to do with those of the refreshing."""
    chance, process = random.Random(0), psutil.Process(terminal.process.pid)
    terminal.press("g")
    time.sleep(1.0)
    seconds, missed, began, before = list[float](), 0, time.perf_counter(), cpu(process)
    for number in range(count):
        since, last = len(terminal.data), commands(terminal.data)[-1]
        pressed = terminal.press("j" if number % 8 < 4 else "k")
        answered = terminal.shown(COMMAND, since, seconds=2.0)
        if answered is None or commands(terminal.data)[-1] == last:
            missed += 1
        else:
            seconds.append(answered - pressed)
        time.sleep(chance.uniform(0.05, 0.25))
    lasted = time.perf_counter() - began
    return {"seconds": seconds, "missed": missed, "cpu": cpu(process) - before, "lasted": lasted}


def late(count: int) -> float:
    """Seconds, p95."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        time.sleep(0.01)
        found.append(time.perf_counter() - began - 0.01)
    return statistics.quantiles(found, n=20)[18]


def commands(data: bytearray) -> list[bytes]:
    """List the rows, in order, for which the shell's way was shown."""
    return re.findall(COMMAND + rb"([\w-]+)", data)


def report(found: Found) -> None:
    table = Table("", "seen", "limit")
    table.add_row("CPU of the TUI", f"{found['cpu']:.1%} of a core", f"{CPU_LIMIT:.0%}")
    table.add_row("first paint", f"{found['paint']:.2f} s", f"{PAINT_LIMIT} s")
    table.add_row("first paint against a bare Python", f"{found['paint_times_python']:.1f} x", "")
    table.add_row("until the screens stand", f"{found['stands']:.2f} s", "")
    table.add_row("CPU time until then", f"{found['stands_cpu']:.2f} s", "")
    key = f"{1e3 * found['key_p50']:.0f}, {1e3 * found['key_p95']:.0f} ms"
    table.add_row("a key answered: p50, p95", key, f"{1e3 * KEY_LIMIT:.0f} ms")
    table.add_row("CPU time for a key", f"{1e3 * found['key_cpu']:.1f} ms", "")
    table.add_row("keys without an answer", str(found["keys_missed"]), "0")
    table.add_row("written", f"{found['bytes'] / 1024:.1f} KiB/s in {found['frames']:.1f} frames/s", "")
    table.add_row("memory of the TUI", f"{found['memory'] / 1e6:.0f} MB", "")
    table.add_row("CPU of the daemon", f"{found['daemon_cpu']:.1%} of a core", "")
    table.add_row(f"steps of the {found['live']} live runs", f"{found['steps']:.1f} a second", "")
    table.add_row("a sleeper wakes up later: p95", f"{1e3 * found['wakes_later']:.1f} ms", "")
    table.add_row(f"load of the machine; {found['ended']} runs ended", f"{found['load']:.1f}", "")
    table.add_row("", "pass" if found["ok"] else "fail", "")
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
