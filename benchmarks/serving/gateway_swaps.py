"""An alias swapped under streaming clients, in a home of its own: daemon, pool and gateway as they always
are.

    python -m benchmarks.serving.gateway_swaps [--swaps 500] [--clients 32] [--tokens 24] [--shared]
        [--json FILE]

Every client streams one greedy completion after another. First undisturbed, then while the alias moves: what
each answer says is compared with what the version of its header says when it is asked alone. The table goes
to stderr, JSON to stdout or FILE. Milliseconds are wall time under full load on a CPU: compare the two
phases.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from tests.kit.world import World, world

ALIAS, PROMPTS = "bot", ("7 3 1", "9 4", "5 2 8 6", "1 1 2")
SPEC = """
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-2, steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 0}
checkpoint: {every: 1, keep: 4}
"""
LOOK = 10  # swaps between two looks at the memory


@dataclass
class Phase:
    """What the clients saw."""

    first: list[float] = field(default_factory=list)  # seconds to the first text
    errors: Counter[str] = field(default_factory=Counter)
    mixed: int = 0  # not what the version of the header says
    stale: int = 0  # of a version that the alias no longer meant when the request began
    versions: Counter[str] = field(default_factory=Counter)


@dataclass
class Traffic:
    """known: what each version says to each prompt. moves: the alias's versions so far, the next one
    included.
    """

    session: aiohttp.ClientSession
    tokens: int
    known: dict[tuple[str, str], str] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)
    moved: int = 0  # how many of the moves have returned
    phase: Phase = field(default_factory=Phase)

    async def clients(self, count: int, ending: asyncio.Event) -> Phase:
        phase = self.phase = Phase()
        await asyncio.gather(*(self._client(number, ending) for number in range(count)))
        return phase

    async def _client(self, number: int, ending: asyncio.Event) -> None:
        while not ending.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            before = self.moved
            try:
                version, text = await self.ask(ALIAS, prompt)
            except (aiohttp.ClientError, RuntimeError) as error:
                self.phase.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                continue
            self.phase.versions[version] += 1
            self.phase.mixed += text != self.known[version, prompt]
            self.phase.stale += version not in self.moves[max(before - 1, 0) :]

    async def ask(self, model: str, prompt: str) -> tuple[str, str]:
        """One stream to its end: the version of its header, the text.

        Raises RuntimeError when anything is odd.
        """
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": self.tokens, "stream": True}
        started, texts, is_done = time.perf_counter(), list[str](), False
        async with self.session.post("http://lorad/v1/completions", json=body) as response:
            version = response.headers.get("x-lorad-version", "")
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if is_done := line == b"data: [DONE]\n":
                    break
                event = json.loads(line[6:])
                if event.get("system_fingerprint") != f"lorad-{version}":
                    raise RuntimeError(f"in a stream of {version}: {event}")
                if not texts:
                    self.phase.first.append(time.perf_counter() - started)
                texts.append(event["choices"][0]["text"])
        if not is_done:
            raise RuntimeError("a stream ended early")
        return version, "".join(texts)


async def measured(made: World, options: argparse.Namespace) -> dict[str, Any]:
    versions = [f"a@{version.version}" for version in made.client.adapters("a")]
    made.client.swap(ALIAS, versions[0])
    socket = made.until(lambda: made.client.status().gateway, "the gateway answers")
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.UnixConnector(socket, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        traffic = Traffic(session, options.tokens, moves=[versions[0]], moved=1)
        for version in versions:
            for prompt in PROMPTS:
                traffic.known[version, prompt] = (await traffic.ask(version, prompt))[1]
        quiet = await undisturbed(traffic, options)
        swaps, memory, seconds, busy = await swapped(traffic, made, versions, options)
    return {
        "swaps": len(swaps),
        "clients": options.clients,
        "different_texts": len({*traffic.known.values()}),
        "swap_ms": quantiles(swaps),
        "quiet": told(quiet, options.quiet),
        "swapping": told(busy, seconds),
        "memory_mb": {who: told_memory([look[who] for look in memory]) for who in memory[0]},
    }


async def undisturbed(traffic: Traffic, options: argparse.Namespace) -> Phase:
    ending = asyncio.Event()
    asyncio.get_running_loop().call_later(options.quiet, ending.set)
    return await traffic.clients(options.clients, ending)


async def swapped(
    traffic: Traffic, made: World, versions: list[str], options: argparse.Namespace
) -> tuple[list[float], list[dict[str, float]], float, Phase]:
    """Seconds of each swap, memory now and then, seconds in all, and what the clients saw."""
    ending, pids = asyncio.Event(), processes(made)
    clients = asyncio.create_task(traffic.clients(options.clients, ending))
    started, seconds, memory = time.perf_counter(), list[float](), [look(pids)]
    for number in range(options.swaps):
        traffic.moves.append(versions[(number + 1) % len(versions)])
        before = time.perf_counter()
        await asyncio.to_thread(made.client.swap, ALIAS, traffic.moves[-1])
        seconds.append(time.perf_counter() - before)
        traffic.moved += 1
        if (number + 1) % LOOK == 0:
            memory.append(look(pids))
    ending.set()
    busy = await clients
    return seconds, memory, time.perf_counter() - started, busy


def processes(made: World) -> dict[str, int]:
    attempts = sorted((made.home.gateway / "attempts").iterdir())
    gateway = json.loads((attempts[-1] / "status.json").read_bytes())["pid"]
    return {"gateway": gateway, "pool": made.client.pools()[0].pid, "daemon": made.client.status().pid}


def look(pids: dict[str, int]) -> dict[str, float]:
    """Resident megabytes."""
    return {who: psutil.Process(pid).memory_info().rss / 1e6 for who, pid in pids.items()}


def told_memory(values: list[float]) -> list[float]:
    """At the start, at the end, and more per 100 swaps over the second half,
    when everything was used once.
    """
    half = values[len(values) // 2 :]
    slope = statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else 0.0
    return [values[0], values[-1], slope * 100 / LOOK]


def told(phase: Phase, seconds: float) -> dict[str, Any]:
    return {
        "requests": phase.versions.total(),
        "requests_per_second": phase.versions.total() / seconds,
        "errors": dict(phase.errors),
        "mixed": phase.mixed,
        "stale": phase.stale,
        "versions": dict(phase.versions),
        "first_token_ms": quantiles(phase.first),
    }


def quantiles(seconds: list[float]) -> list[float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return [1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.99)]


def show(found: dict[str, Any]) -> None:
    table = Table(
        title=f"{found['swaps']} swaps under {found['clients']} streaming clients, builtin:tiny on a CPU"
    )
    for name in ("", "undisturbed", "while swapping"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    phases = found["quiet"], found["swapping"]
    table.add_row("streams", *(str(phase["requests"]) for phase in phases))
    table.add_row("streams/s", *(f"{phase['requests_per_second']:.1f}" for phase in phases))
    table.add_row("errors", *(str(sum(phase["errors"].values())) for phase in phases))
    table.add_row("streams that mixed versions", *(str(phase["mixed"]) for phase in phases))
    table.add_row("streams of a version before the last swap", *(str(phase["stale"]) for phase in phases))
    table.add_row("first token, ms, p50 / p99", *(pair(phase["first_token_ms"]) for phase in phases))
    table.add_row("swap, ms, p50 / p99", "", pair(found["swap_ms"]))
    for who, (first, last, slope) in found["memory_mb"].items():
        table.add_row(
            f"{who}, MB, start -> end; per 100 swaps", "", f"{first:.0f} -> {last:.0f}; {slope:+.2f}"
        )
    console = Console(stderr=True, width=120)
    console.print(table, *found["swapping"]["errors"])
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def pair(values: list[float]) -> str:
    return " / ".join(f"{value:.0f}" for value in values)


def is_wrong(found: dict[str, Any]) -> bool:
    return any(
        phase["errors"] or phase["mixed"] or phase["stale"] for phase in (found["quiet"], found["swapping"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="an alias swapped under streaming clients")
    parser.add_argument("--swaps", type=int, default=500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="of each completion, at most")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds without swaps before")
    parser.add_argument(
        "--shared", action="store_true", help="a pool whose calls share batches (deterministic: false)"
    )
    parser.add_argument("--json", type=Path, help="write the result there instead of to stdout")
    options = parser.parse_args()
    with world() as made:
        made.run("a", *(["deterministic=false"] if options.shared else []), text=SPEC)
        found = asyncio.run(measured(made, options))
    show(found)
    text = json.dumps({"load": os.getloadavg()[0], "shared": options.shared, **found}, indent=2)
    print(text) if options.json is None else options.json.write_text(text + "\n")
    if is_wrong(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
