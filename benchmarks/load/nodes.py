"""What nodes cost the pool that leads them: many agents at rest, and a version given to 16 of them.

    python -m benchmarks.load.nodes [--agents 100,400] [--ranks 8] [--seconds 15] [--mib 32]
        [--json FILE]

Agents are real but for a process of their own: some processes of this machine have all of them. Each says a
heartbeat a second for each rank. A version goes to 16 agents once directly (star) and once by way of each
other (tree); here all of them share the cores and the memory of one machine, so only the pool's own share of
the work is what it would be elsewhere.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from lorad.children import host as hosts
from lorad.children.host import put_on_all
from lorad.nodes.certificates import Credentials
from lorad.nodes.messages import Wrote
from lorad.nodes.remote import Node
from lorad.protocol.nodes import GrantedNode
from tests.nodes.swarm import Swarm, led, listening

PROCESSES = 4
LEASE = 30.0
RELAYED, ROUNDS = 16, 2
ASKED_PER_SECOND = 20


async def beat(swarm: Swarm, ranks: int) -> None:
    """Say what ranks would write, for ever."""
    while True:
        text = json.dumps({"time": time.time(), "work": "forward_backward", "since": time.monotonic()})
        for agent in (agent for agent in swarm.agents.values() if not agent.ending.done()):
            for rank in range(ranks):
                said = Wrote(name="trainer", file=f"rank-{rank}.heartbeat", text=text)
                with contextlib.suppress(AttributeError):  # nobody leads it yet
                    await agent.control._say(said)
        await asyncio.sleep(1.0)


async def serve(root: Path, first: int, count: int, ranks: int) -> None:
    """Have agents until stdin ends; prints what they are."""
    head = (root / "head.pem").read_text()
    names = [f"n{place:03}" for place in range(first, first + count)]
    async with listening(root, names, head, LEASE) as swarm:
        print(msgspec.json.encode(swarm.told).decode(), flush=True)
        beats = asyncio.create_task(beat(swarm, ranks))
        await asyncio.to_thread(sys.stdin.read)
        beats.cancel()


def begun(root: str, first: int, last: int, ranks: int) -> subprocess.Popen[str]:
    """A process with some of the agents, which ends with its stdin."""
    argv = ["--serve", root, "--first", str(first), "--count", str(last - first), "--ranks", str(ranks)]
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.asynccontextmanager
async def world(agents: int, ranks: int) -> AsyncIterator[tuple[list[Node], Path]]:
    """Nodes that are connected, and a directory."""
    with tempfile.TemporaryDirectory(prefix="ln") as name, contextlib.ExitStack() as stack:
        root = Path(name)
        credentials = Credentials("pool", root)
        (root / "head.pem").write_text(credentials.pem)
        processes = [
            stack.enter_context(
                begun(name, agents * place // PROCESSES, agents * (place + 1) // PROCESSES, ranks)
            )
            for place in range(PROCESSES)
        ]
        told: list[GrantedNode] = []
        for process in processes:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            told += msgspec.json.decode(line, type=list[GrantedNode])
        async with led(told, credentials, LEASE) as nodes:
            yield nodes, root


async def at_rest(agents: int, ranks: int, seconds: float) -> dict[str, Any]:
    """CPU of the pool's process in percent of a core, its memory, and the time of a request."""
    before = psutil.Process().memory_info().rss
    async with world(agents, ranks) as (nodes, _):
        await asyncio.sleep(2.0)
        begun, cpu, times = time.monotonic(), time.process_time(), []
        while time.monotonic() < begun + seconds:
            asked = time.monotonic()
            await random.choice(nodes).digest("absent")
            times.append(time.monotonic() - asked)
            await asyncio.sleep(1 / ASKED_PER_SECOND)
        busy = (time.process_time() - cpu) / (time.monotonic() - begun)
        assert not any(node.lost.done() for node in nodes)
        grown = psutil.Process().memory_info().rss - before
    middle, late = np.percentile(times, [50, 99]) * 1e3
    return {
        "agents": agents,
        "ranks": agents * ranks,
        "cpu_percent": round(100 * busy, 1),
        "memory_mib": round(grown / (1 << 20)),
        "rtt_ms_p50": round(float(middle), 2),
        "rtt_ms_p99": round(float(late), 2),
    }


async def given(nodes: list[Node], source: Path, star: int, name: str) -> dict[str, Any]:
    """A version, to all nodes. star: see `hosts._STAR`."""
    found = []
    for again in range(ROUNDS):
        hosts._STAR = star
        begun, cpu = time.monotonic(), time.process_time()
        outcomes = await put_on_all(nodes, f"adapters/{name}-{again}", source)
        found.append((time.monotonic() - begun, time.process_time() - cpu))
        assert outcomes == [None] * len(nodes), outcomes
        await asyncio.gather(*(node.remove(f"adapters/{name}-{again}") for node in nodes))
    wall, busy = min(found)
    return {"way": name, "seconds": round(wall, 2), "pool_cpu_seconds": round(busy, 2)}


async def relayed(mib: int) -> list[dict[str, Any]]:
    async with world(RELAYED, 0) as (nodes, root):
        source = root / "source"
        source.mkdir()
        (source / "weights").write_bytes(os.urandom(mib << 20))
        return [
            {"agents": RELAYED, "mib": mib, **await given(nodes, source, star, name)}
            for star, name in ((RELAYED, "star"), (1, "tree"))
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", default="100,400")
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.first, arguments.count, arguments.ranks))
        return
    rows = []
    for count in map(int, filter(None, arguments.agents.split(","))):
        rows.append(asyncio.run(at_rest(count, arguments.ranks, arguments.seconds)))
        print(rows[-1], flush=True)
    for row in asyncio.run(relayed(arguments.mib)):
        rows.append(row)
        print(row, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
