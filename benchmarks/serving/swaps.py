"""`make bench-swaps`: versions swapped under traffic, on the builtin engine and on the real SGLang and vLLM.

    python -m benchmarks.serving.swaps [--swaps N] [--concurrency N] [--engines builtin,sglang,vllm]
        [--json FILE]

Each engine runs in a process of its own, on builtin:tiny. LORAD_SGLANG_PYTHON and LORAD_VLLM_PYTHON name the
interpreters of the servers, as `make test-engines` has them. The table goes to stderr, JSON to stdout or
FILE. Milliseconds are wall time under full load on a CPU: compare the engines' behaviour, not their speed.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kit import ours
from benchmarks.kit.workload import TINY
from benchmarks.serving.swapping import judged, swapped
from lorad.engines.base import Engine
from tests.engines.real.places import KINDS, python_of, variable
from tests.engines.real.places import opened as server

ENGINES = ("builtin", *KINDS)
TOLERANCE = 1e-4  # nats, fp32
JUDGED = 20  # samples that transformers and PEFT are asked about

ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("swaps; requests", lambda found: f"{found['swaps']}; {found['requests']}"),
    ("failed requests", lambda found: str(found["failed"])),
    ("requests that mixed versions", lambda found: str(found["mixed"])),
    ("requests that crossed a swap", lambda found: str(found["crossed"])),
    ("samples against their own score, nats", lambda found: f"{found['own_score_difference']:.1e}"),
    (
        "  against PEFT, nats (under the next version)",
        lambda found: f"{found['right']:.1e} ({found['wrong']:.1f})",
    ),
    ("load, ms, p50 / p99", lambda found: pair(found["load_ms"])),
    ("load + first token, ms, p50 / p99", lambda found: pair(found["first_token_ms"])),
    ("unload, ms, p50 / p99 (waits for requests)", lambda found: pair(found["unload_ms"])),
    ("lorad's process, MB, before -> after", lambda found: "{:.0f} -> {:.0f}".format(*found["own_mb"])),
    ("  MB per 100 swaps", lambda found: f"{found['own_mb'][2]:+.1f}"),
    ("servers, MB, before -> after", lambda found: "{:.0f} -> {:.0f}".format(*found["servers_mb"])),
    ("  MB per 100 swaps", lambda found: f"{found['servers_mb'][2]:+.1f}"),
    ("left loaded; directories; processes", lambda found: left(found)),
    ("requests/s while swapping (before)", lambda found: rates(found)),
)


def pair(values: list[float]) -> str:
    return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in values)


def left(found: dict[str, Any]) -> str:
    return "; ".join(str(len(found[what])) for what in ("still_loaded", "leftovers", "processes_left"))


def rates(found: dict[str, Any]) -> str:
    return f"{found['requests_per_second']:.1f} ({found['quiet_requests_per_second']:.1f})"


def faults(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    wrong = [
        what for what in ("failed", "mixed", "still_loaded", "leftovers", "processes_left") if found[what]
    ]
    wrong += [what for what in ("own_score_difference", "right") if not found[what] < TOLERANCE]
    return wrong + ([] if found["wrong"] > 100 * TOLERANCE else ["wrong"])


@asynccontextmanager
async def opened(kind: str, work: Path) -> AsyncIterator[Engine]:
    if kind == "builtin":
        async with ours.opened(TINY, mix_calls=True) as held:  # as in a pool
            yield held.engine
    else:
        async with server(kind, work) as engine:
            yield engine


async def measured(kind: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure one engine."""
    async with opened(kind, work) as engine:
        software = engine.software()
        found, traffic = await swapped(engine, options.swaps, options.concurrency, work)
    return {
        "engine": kind,
        "software": software,
        **found,
        **judged(list(traffic.samples.values()), options.swaps, JUDGED, work),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="versions swapped under traffic")
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight at all times")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of: %(default)s")
    parser.add_argument("--json", type=Path, help="write the result there instead of to stdout")
    parser.add_argument("--here", choices=ENGINES, help=argparse.SUPPRESS)  # one engine, in this process
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(f"there is no engine {', '.join(sorted(unknown))}; choose from {', '.join(ENGINES)}")
    if lacking := [kind for kind in options.engines if kind in KINDS and not python_of(kind)]:
        parser.error(f"{', '.join(map(variable, lacking))} must name the interpreter of the server")
    return options


def apart(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine in a process of its own."""
    print(f"{kind}: {options.swaps} swaps under {options.concurrency} requests", file=sys.stderr)
    sizes = ["--swaps", str(options.swaps), "--concurrency", str(options.concurrency)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.swaps",
        *sizes,
        "--engines",
        kind,
        "--here",
        kind,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{kind} could not be measured")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="versions swapped under traffic, builtin:tiny on a CPU")
    table.add_column("", no_wrap=True)
    for found in results:
        table.add_column(" ".join([found["engine"], *found["software"].values()]), justify="right")
    for what, cell in ROWS:
        table.add_row(what, *(cell(found) for found in results))
    console = Console(stderr=True, width=120)
    console.print(table)
    for found in results:
        console.print(f"{found['engine']}: {', '.join(faults(found)) or 'as it must be'}", *found["errors"])
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def main() -> None:
    options = parse()
    if options.here:
        with tempfile.TemporaryDirectory(prefix="lr-") as work:
            print(json.dumps(asyncio.run(measured(options.here, options, Path(work)))), flush=True)
        return
    results = [apart(kind, options) for kind in options.engines]
    show(results)
    text = json.dumps({"load": os.getloadavg()[0], "engines": results}, indent=2)
    print(text) if options.json is None else options.json.write_text(text + "\n")
    if any(faults(found) for found in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
