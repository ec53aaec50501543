"""Directories reach many nodes by way of each other, whoever fails."""

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorad.children.host import put_on_all
from lorad.errors import LoradError, NotAllowed, PoolLost
from lorad.nodes import streams
from lorad.nodes.certificates import Credentials
from lorad.nodes.messages import Hello, Peer
from lorad.nodes.relay import Relay
from lorad.nodes.remote import Node
from lorad.nodes.streams import Broken, receive_files
from tests.nodes.kit import LIFE
from tests.nodes.swarm import Swarm, led, listening

NAMES = [f"n{place:02}" for place in range(16)]
ROOTS, BELOW = NAMES[:2], NAMES[2:]  # the first of each half, and those behind


class World:
    def __init__(self, swarm: Swarm, nodes: list[Node], source: Path) -> None:
        self.swarm, self.nodes, self.source = swarm, nodes, source
        self.puts: list[str] = []  # by the pool itself, one by one

    async def put(self) -> list[BaseException | None]:
        return await put_on_all(self.nodes, "adapters/run@1", self.source)

    async def whole(self) -> list[str]:
        """Names of nodes that have all bytes."""
        data = (self.source / "weights").read_bytes()
        wanted = hashlib.sha256(data).hexdigest()
        digests = {node.name: await node.digest("adapters/run@1/weights") for node in self.nodes}
        return [name for name, digest in digests.items() if digest == wanted]

    def left(self) -> set[str]:
        """What lies in the directories of adapters."""
        places = (agent.places.directory / "adapters" for agent in self.swarm.agents.values())
        return {path.name for place in places for path in place.iterdir()}


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(os.urandom((5 << 20) + 7))
    (source / "empty").write_bytes(b"")
    credentials = Credentials("pool", tmp_path)
    async with (
        listening(tmp_path, NAMES, credentials.pem, lease=5.0) as swarm,
        led(swarm.told, credentials, lease=5.0) as nodes,
    ):
        made = World(swarm, nodes, source)
        put = Node.put

        async def noted(node: Node, name: str, directory: Path) -> Path:
            made.puts.append(node.name)
            return await put(node, name, directory)

        monkeypatch.setattr(Node, "put", noted)
        yield made


@pytest.mark.system
async def test_many_nodes_pass_a_directory_on(world: World) -> None:
    assert await world.put() == [None] * 16
    assert await world.whole() == NAMES and world.puts == []
    assert world.left() == {"run@1"}


@pytest.mark.system
async def test_a_dead_relay_is_passed_by(world: World) -> None:
    for name in (ROOTS[0], BELOW[3]):
        world.swarm.servers[name].close()
    outcomes = dict(zip(NAMES, await world.put(), strict=True))
    dead = {name for name, error in outcomes.items() if error is not None}
    assert dead == {ROOTS[0], BELOW[3]} and set(world.puts) == dead
    assert all(isinstance(outcomes[name], PoolLost) for name in dead)
    assert set(await world.whole()) == set(NAMES) - dead


async def test_a_relay_may_die_amid_the_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = world.swarm.agents[ROOTS[1]]
    seen: list[bytes] = []

    async def cut(*arguments: object) -> None:
        if str(broken.places.directory) in str(arguments[1]) and not seen:
            seen.append(await arguments[0].read(1 << 20))  # type: ignore[attr-defined]
            raise Broken("it was killed")
        await receive_files(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(streams, "receive_files", cut)
    assert await world.put() == [None] * 16
    assert seen and set(world.puts) == set(NAMES[1::2])
    assert await world.whole() == NAMES and world.left() == {"run@1"}


@pytest.mark.system
async def test_each_hop_hashes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that one relay changes are nowhere: those behind it are given them directly."""
    send = Relay.send

    async def flipped(relay: Relay, data: bytes) -> None:
        is_one = relay._credentials is world.swarm.agents[ROOTS[0]].credentials
        await send(relay, bytes([data[0] ^ 1]) + data[1:] if is_one else data)

    monkeypatch.setattr(Relay, "send", flipped)
    assert await world.put() == [None] * 16
    assert set(world.puts) == set(NAMES[0::2]) - {ROOTS[0]}
    assert await world.whole() == NAMES and world.left() == {"run@1"}


@pytest.mark.system
async def test_another_agent_may_only_put(world: World, tmp_path: Path) -> None:
    first, second = (world.swarm.agents[name] for name in ROOTS)
    told = world.swarm.told[1]
    peer = Peer(told.node, told.ip, told.port, told.certificate)
    relay = Relay(first.credentials, LIFE, 5.0, [peer])
    with pytest.raises((LoradError, OSError)):  # it is not known yet
        await relay._connected(peer, Hello(kind="put", life=LIFE, name="adapters/x"))
    await world.put()
    for kind in ("control", "tunnel", "serve", "fetch"):
        with pytest.raises((NotAllowed, OSError)):
            await relay._connected(peer, Hello(kind=kind, life=LIFE, name="adapters/run@1"))
    assert not second.ending.done()
