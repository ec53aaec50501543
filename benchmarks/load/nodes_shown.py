"""What the commands and the dashboard cost where a pool has 100 nodes of 8 devices.

    python -m benchmarks.load.nodes_shown [--nodes 100] [--seconds 30]

The daemon is in this process, with stand-ins for the pool and the driver of one run over all nodes; `lorad`
is the real one, in processes of its own and a pseudo-terminal of 120x36. No key is touched meanwhile.
"""

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.load.terminal import Terminal
from lorad.box.config import Backend
from lorad.protocol.preflight import SpecFacts
from lorad.store import runs
from tests.kit.daemon_world import behave, serving, submit, until
from tests.kit.fakes.fake_cluster import cluster
from tests.kit.leftovers import kill_leftovers

_COMMANDS = (("list",), ("nodes",), ("devices",), ("pools",))
_ROUNDS = 5
_LORAD = [sys.executable, "-m", "lorad"]


async def _measure(home: Path, nodes: int, seconds: float) -> None:
    backends = {"sglang": Backend(python=Path("/opt/sglang/bin/python"))}
    behave(home, driver={"seconds": 2.0})
    async with serving(home, backends=backends, cluster=cluster(home, nodes)) as api:
        devices = 8 * nodes
        submit(
            api.ctx,
            "wide",
            "/models/one",
            facts=SpecFacts(max_positions=2048),
            trainer={"backend": "fsdp", "dp": devices, "steps": 10_000},
            rollout={"backend": "sglang", "servers": nodes, "tp": 8},
            resources={"nodes": nodes, "devices": devices, "where": "cluster"},
        )
        await until(lambda: runs.get(api.ctx.store, "wide").state == "running")
        shown = await asyncio.to_thread(api.client.devices)
        print(f"{nodes} nodes, {len(shown)} devices shown")
        await asyncio.to_thread(_commands, home)
        await asyncio.to_thread(_dashboard, home, seconds)


def _commands(home: Path) -> None:
    for command in _COMMANDS:
        taken, cpu, size = list[float](), list[float](), 0
        for _ in range(_ROUNDS):
            began, before = time.perf_counter(), _cpu_of_children()
            argv, env = [*_LORAD, *command], os.environ | {"LORAD_HOME": str(home)}
            done = subprocess.run(argv, env=env, capture_output=True, check=True)
            taken.append(time.perf_counter() - began)
            cpu.append(_cpu_of_children() - before)
            size = len(done.stdout)
        print(
            f"lorad {' '.join(command)}: {statistics.median(taken):.2f} s, {statistics.median(cpu):.2f} s of "
            f"processor, {size / 1024:.0f} KiB"
        )


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _dashboard(home: Path, seconds: float) -> None:
    terminal = Terminal([*_LORAD, "tui"], home)
    try:
        process = psutil.Process(terminal.process.pid)
        assert terminal.shown(b"lorad show ") is not None, "the dashboard does not stand"
        print(f"the dashboard: {_watched(process, seconds)}")
        before, pressed = _cpu(process), terminal.press("N")
        answered = terminal.shown(b"lorad nodes")
        assert answered is not None, "the nodes are not shown"
        used = _cpu(process) - before
        print(f"the screen of nodes stands: {answered - pressed:.2f} s, {used:.2f} s of processor")
        print(f"the screen of nodes: {_watched(process, seconds)}")
    finally:
        terminal.close()


def _watched(process: psutil.Process, seconds: float) -> str:
    time.sleep(3.0)
    before, began = _cpu(process), time.perf_counter()
    time.sleep(seconds)
    share = (_cpu(process) - before) / (time.perf_counter() - began)
    return f"{share:.1%} of a core, {process.memory_info().rss >> 20} MiB"


def _cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lr-") as place:
        home = Path(place) / "home"
        home.mkdir(mode=0o700)
        os.environ["LORAD_HOME"] = str(home)
        try:
            asyncio.run(_measure(home, options.nodes, options.seconds))
        finally:
            kill_leftovers(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
