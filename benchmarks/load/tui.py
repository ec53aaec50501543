"""`make bench-tui`: what `lorad tui` costs in a real pseudo-terminal of 120x36, beside live runs and a long
history.

    python -m benchmarks.load.tui [--live 4] [--runs 200] [--steps 2000] [--pace 5] [--minutes 1]
        [--keys 200] [--rounds 5] [--json FILE]

`--runs` is how many there are, `--live` of them make a step every `--pace` seconds, as fast as they can with
0. The others ended after `--steps` steps. `--minutes 60` is an hour over SSH.

A first paint lasts from exec to the end of the first frame that names a run: what `lorad top` shows, until
the screens stand, which is reported separately. A key is answered when the frame arrived that shows the
command for the next row, or for the next metric of a run's curves. Both are wall time, beside the runs that
train on the same cores; what these and others take shows in how much later than asked for a sleeper wakes up.
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

from benchmarks.load.history import fill
from benchmarks.load.load import SPEC
from benchmarks.load.terminal import FRAME, Terminal
from tests.kit.world import World, world

CPU_LIMIT, PAINT_LIMIT, KEY_LIMIT = 0.02, 0.5, 0.050  # of a core; seconds; seconds, p95
GROWTH_LIMIT = 2e6  # bytes that are left at the end beyond those after a quarter of the time
LOOK = 5.0  # seconds between two looks at the memory
NAMED = b"job-"  # the beginning of a live run's name
ROW, METRIC = b"lorad show ", b"lorad plot "  # the commands that keys make the status line show
REWARD = """
import time


def paced(prompt: str, completion: str, answer: str) -> float:
    time.sleep({seconds})
    return float(completion.strip() == answer)
"""
Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("live", 4), ("runs", 200), ("steps", 2000), ("keys", 200), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, amount in (("pace", 5.0), ("minutes", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=amount)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with world() as made:
        fill(made, options.runs - options.live, options.steps)
        start(made, options.live, options.pace)
        found = measured(made, options)
    report(found)
    text = json.dumps(found, indent=1)
    options.json.write_text(text) if options.json else print(text)
    return int(not found["ok"])


def start(made: World, live: int, pace: float) -> None:
    names = [f"job-{number}" for number in range(live)]
    made.spec(REWARD.format(seconds=pace / 16), "paced.py")  # of a step with 16 samples
    spec = made.spec(SPEC + ("reward: paced.py:paced\n" if pace else ""))
    for number, name in enumerate(names):
        made.lorad("run", spec, f"seed={number}", "--name", name, "--detach")
    for name in names:
        made.reached(name, 2)


def measured(made: World, options: argparse.Namespace) -> Found:
    paints, bare = [], []
    for _ in range(options.rounds):
        bare.append(python_start())
        paints.append(first_paint(made))
    with dashboard(made) as terminal:
        calm = watched(terminal, made, 60.0 * options.minutes)
        terminal.press("g")
        rows = keys(terminal, options.keys, ROW, calm["cpu"])
        terminal.press("\r")
        curves = keys(terminal, options.keys // 2, METRIC, calm["cpu"])
    paint = statistics.median(one["seconds"] for one in paints)
    return {
        "load": os.getloadavg()[0],
        "live": options.live,
        "runs": options.runs,
        "steps_of_ended": options.steps,
        "minutes": options.minutes,
        "paint": paint,
        "stands": statistics.median(one["stands"] for one in paints),
        "stands_cpu": statistics.median(one["cpu"] for one in paints),
        "paint_times_python": paint / statistics.median(bare),
        "paints": paints,
        "rows": rows,
        "curves": curves,
        "wakes_later": late(200),
        **calm,
        "ok": calm["cpu"] < CPU_LIMIT
        and calm["grown"] < GROWTH_LIMIT
        and paint < PAINT_LIMIT
        and max(rows["p95"], curves["p95"]) < KEY_LIMIT
        and not rows["missed"] + curves["missed"],
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
        painted, stands = terminal.shown(NAMED), terminal.shown(ROW)
        assert painted and stands, f"no run was shown:\n{terminal.data.decode(errors='replace')}"
        used = cpu(psutil.Process(terminal.process.pid))
        return {"seconds": painted - terminal.began, "stands": stands - terminal.began, "cpu": used}


def watched(terminal: Terminal, made: World, seconds: float) -> Found:
    """While nobody touches it."""
    assert terminal.shown(ROW) is not None, terminal.data.decode(errors="replace")
    time.sleep(3.0)
    processes = [psutil.Process(pid) for pid in (terminal.process.pid, made.client.status().pid)]
    before, began, steps = [cpu(one) for one in processes], len(terminal.data), steps_of(made)
    started, memory = time.perf_counter(), list[int]()
    while (left := started + seconds - time.perf_counter()) > 0:
        memory.append(processes[0].memory_info().rss)
        time.sleep(min(left, LOOK))
    lasted = time.perf_counter() - started
    shares = [(cpu(one) - first) / lasted for one, first in zip(processes, before, strict=True)]
    drawn = terminal.data[began:]
    memory.append(processes[0].memory_info().rss)
    return {
        "cpu": shares[0],
        "daemon_cpu": shares[1],
        "bytes": len(drawn) / lasted,
        "frames": drawn.count(FRAME) / lasted,
        "steps": (steps_of(made) - steps) / lasted,
        "memory": memory[:: max(len(memory) // 60, 1)],
        "memory_first": memory[0],
        "memory_last": memory[-1],
        "grown": memory[-1] - memory[len(memory) // 4],
    }


def cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def steps_of(made: World) -> int:
    return sum(run.step for run in made.client.list())


def keys(terminal: Terminal, count: int, command: bytes, calm: float) -> Found:
    """Four down and four up again, at moments that have nothing to do with those of the refreshing.

    calm: the share of a core that is used without keys.
    """
    chance, process = random.Random(0), psutil.Process(terminal.process.pid)
    time.sleep(2.0)
    seconds, missed, began, before = list[float](), 0, time.perf_counter(), cpu(process)
    for number in range(count):
        since, last = len(terminal.data), shown(terminal.data, command)
        pressed = terminal.press("j" if number % 8 < 4 else "k")
        answered = terminal.shown(command, since, seconds=2.0)
        if answered is None or shown(terminal.data, command) == last:
            missed += 1
        else:
            seconds.append(answered - pressed)
        time.sleep(chance.uniform(0.05, 0.25))
    used, lasted = cpu(process) - before, time.perf_counter() - began
    p50, p95 = (statistics.quantiles(seconds, n=20)[rank] for rank in (9, 18))
    each = max(used - calm * lasted, 0.0) / count
    return {"p50": p50, "p95": p95, "missed": missed, "cpu": each, "seconds": seconds}


def late(count: int) -> float:
    """Seconds, p95."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        time.sleep(0.01)
        found.append(time.perf_counter() - began - 0.01)
    return statistics.quantiles(found, n=20)[18]


def shown(data: bytearray, command: bytes) -> bytes:
    """Return the last one that the status line offered."""
    found = re.findall(command + rb"([\w -]+)", data[-200_000:])
    return found[-1] if found else b""


def report(found: Found) -> None:
    table = Table("", "seen", "limit")
    live = f"{found['live']} of {found['runs']} runs live, {found['steps']:.1f} steps a second"
    table.add_row("", live, "")
    table.add_row(
        f"CPU of the TUI in {found['minutes']:g} min", f"{found['cpu']:.1%} of a core", f"{CPU_LIMIT:.0%}"
    )
    table.add_row("CPU of the daemon", f"{found['daemon_cpu']:.1%} of a core", "")
    table.add_row("first paint", f"{found['paint']:.2f} s", f"{PAINT_LIMIT} s")
    table.add_row("first paint against a bare Python", f"{found['paint_times_python']:.1f} x", "")
    table.add_row("until the screens stand", f"{found['stands']:.2f} s", "")
    table.add_row("CPU time until then", f"{found['stands_cpu']:.2f} s", "")
    for name, of in (("dashboard", found["rows"]), ("curves", found["curves"])):
        key = f"{1e3 * of['p50']:.0f}, {1e3 * of['p95']:.0f} ms"
        table.add_row(f"a key answered, {name}: p50, p95", key, f"{1e3 * KEY_LIMIT:.0f} ms")
        table.add_row("CPU time for it", f"{1e3 * of['cpu']:.1f} ms", "")
        table.add_row("keys without an answer", str(of["missed"]), "0")
    minute = f"{found['bytes'] * 60 / 1024:.0f} KiB/min in {found['frames'] * 60:.0f} frames"
    table.add_row("written to the terminal", minute, "")
    memory = f"{found['memory_first'] / 1e6:.0f} -> {found['memory_last'] / 1e6:.0f} MB"
    table.add_row("memory of the TUI", memory, "")
    grown, most = f"{found['grown'] / 1e6:+.1f} MB", f"{GROWTH_LIMIT / 1e6:.0f} MB"
    table.add_row("grown after the first quarter", grown, most)
    table.add_row("a sleeper wakes up later: p95", f"{1e3 * found['wakes_later']:.1f} ms", "")
    table.add_row("load of the machine", f"{found['load']:.1f}", "")
    table.add_row("", "pass" if found["ok"] else "fail", "")
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
