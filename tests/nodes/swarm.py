"""Many nodes in this process: agents that are real but for a process of their own."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import lorad
from lorad.children.identity import boot_id
from lorad.nodes.agent import Agent
from lorad.nodes.certificates import Credentials
from lorad.nodes.messages import LINE
from lorad.nodes.places import Places
from lorad.nodes.remote import Node
from lorad.protocol.nodes import AgentStart, GrantedNode
from tests.nodes.kit import LIFE, setup


class Swarm:
    """agents, servers: by node. told: what a grant would say."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.servers: dict[str, asyncio.Server] = {}
        self.told: list[GrantedNode] = []

    async def add(self, name: str, directory: Path, head: str, lease: float) -> None:
        """Have an agent listen. head: the certificate of its pool."""
        (directory / "adapters").mkdir(parents=True)
        agent = Agent(LIFE, lease, AgentStart(certificate=head), Places(directory), name)
        self.servers[name] = await asyncio.start_server(
            agent.connected, "127.0.0.1", 0, ssl=agent.context, limit=LINE
        )
        self.agents[name] = agent
        self.told.append(
            GrantedNode(
                node=name,
                ip="127.0.0.1",
                port=self.servers[name].sockets[0].getsockname()[1],
                certificate=agent.credentials.pem,
                boot_id=boot_id(),
                directory=str(directory),
                pid=os.getpid(),
                lorad=lorad.__version__,
                uid=os.getuid(),
            )
        )

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


@asynccontextmanager
async def listening(root: Path, names: Sequence[str], head: str, lease: float = 30.0) -> AsyncIterator[Swarm]:
    """Agents with directories in `root`."""
    swarm = Swarm()
    try:
        for name in names:
            await swarm.add(name, root / name, head, lease)
        yield swarm
    finally:
        swarm.close()


@asynccontextmanager
async def led(
    told: Sequence[GrantedNode], credentials: Credentials, lease: float = 30.0
) -> AsyncIterator[list[Node]]:
    """Nodes that are connected."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Node.connected(each, credentials, LIFE, setup(lease=lease)))
            for each in told
        ]
