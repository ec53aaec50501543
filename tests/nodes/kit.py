"""Nodes on this machine: agents with addresses, directories and names of their own."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from lorad.nodes.certificates import Credentials
from lorad.nodes.remote import Node
from lorad.protocol.nodes import AgentStart, GrantedNode, NodesSetup
from lorad.protocol.pool_setup import RanksSetup
from lorad.trainers.ranks.remote import RanksSettings, RemoteTrainer
from tests.kit.warm.processes import Forked, is_warm
from tests.trainers.real.start import setup_of

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "lorad" / "models" / "tiny"
LIFE = "pool@1"


class Agents:
    """Agents of one pool's life. temporary: each has a directory of its own in it."""

    def __init__(self, temporary: Path, lease: float = 30.0) -> None:
        self.temporary, self.lease = temporary, lease
        self.credentials = Credentials("pool", temporary)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._all: list[subprocess.Popen[bytes]] = []
        self.short = Path(tempfile.mkdtemp(prefix="ln", dir="/tmp"))  # for sockets

    def begin(self, name: str, address: str, devices: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start an agent and tell it whose it is."""
        own = self.short / name
        own.mkdir(exist_ok=True)
        flags = ["--life", LIFE, "--address", address, "--lease", str(self.lease), "--name", name]
        argv = ["-P", "-m", "lorad.nodes.agent", *flags]
        env = os.environ | {"TMPDIR": str(own), "PYTHONPATH": str(ROOT)}
        if is_warm():
            process: subprocess.Popen[bytes] = Forked.with_pipes(argv, env)
        else:
            process = subprocess.Popen(
                [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
            )
        self.processes[name] = process
        self._all.append(process)
        start = AgentStart(certificate=self.credentials.pem, devices=tuple(devices))
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
        return process

    @staticmethod
    async def said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The one line of an agent."""
        assert process.stdout is not None
        line: dict[str, Any] = json.loads(await asyncio.to_thread(process.stdout.readline))
        return line

    async def granted(self, name: str, address: str = "127.0.0.1") -> GrantedNode:
        return msgspec.convert(await self.said(self.begin(name, address)), GrantedNode)

    def end(self) -> None:
        for process in self._all:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.send_signal(signal.SIGCONT)
            process.wait(30)
        self._all.clear()
        shutil.rmtree(self.short)


def setup(**changes: Any) -> NodesSetup:
    return msgspec.structs.replace(NodesSetup(nodes=2, python=sys.executable), **changes)


@asynccontextmanager
async def nodes(
    temporary: Path, lease: float = 30.0, addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2")
) -> AsyncIterator[tuple[Agents, list[Node]]]:
    """Nodes h1, h2, … that are connected."""
    agents = Agents(temporary, lease)
    try:
        async with AsyncExitStack() as stack:
            told = [await agents.granted(f"h{place}", at) for place, at in enumerate(addresses, 1)]
            own = setup(lease=lease)
            yield (
                agents,
                [
                    await stack.enter_async_context(Node.connected(each, agents.credentials, LIFE, own))
                    for each in told
                ],
            )
    finally:
        await asyncio.to_thread(agents.end)


class OverNodes(RemoteTrainer):
    """Its end is that of its nodes."""

    stack: AsyncExitStack

    async def shut_down(self) -> None:
        await super().shut_down()
        await self.stack.aclose()


async def over_nodes(backend: str, root: Path, model: Path, **sizes: Any) -> OverNodes:
    """Start a real backend on two nodes of its own."""
    settings = RanksSettings(backend=backend, model=model, name=str(model), dtype="float32")
    async with AsyncExitStack() as stack:
        _, hosts = await stack.enter_async_context(nodes(root))
        trainer = await OverNodes.start(
            setup_of(backend, **sizes), settings, work=root, logs=root, hosts=hosts
        )
        trainer.stack = stack.pop_all()
    return trainer


async def tiny_trainer(
    root: Path, hosts: Sequence[Node] = (), *, hang: float = 120.0, model: Path = MODEL, **changes: Any
) -> RemoteTrainer:
    """Two ranks of the tiny body, on nodes, or here without any. changes: of their setup."""
    args = {"gate": str(root / "gate")} | changes.pop("args", {})
    setup = RanksSetup(**{"dp": 2, "env": {"PYTHONPATH": str(ROOT)}, "args": args} | changes)
    settings = RanksSettings(
        backend="tiny",
        body="tests.kit.fakes.rank_kit:open_body",
        model=model,
        name="tiny",
        dtype="float32",
        hang=hang,
    )
    return await RemoteTrainer.start(setup, settings, work=root, logs=root, hosts=hosts)
