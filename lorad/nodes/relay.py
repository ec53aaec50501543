"""Copying a directory to many nodes: each passes on what arrives, two ways, while it arrives.

A node that does not answer is left out, and the next one takes its place. When one fails amid the bytes, the
nodes behind it get nothing either: `close` names them, and they are then sent the directory directly.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from lorad.errors import LoradError, PoolLost, to_wire
from lorad.nodes.certificates import Credentials, check_peer
from lorad.nodes.messages import LINE, Done, Failures, FileEntry, Hello, Peer
from lorad.nodes.streams import Pair, answer_of, as_error, drop, never_hangs, write

_WAYS = 2
_CONNECT_SECONDS = 10.0


@dataclass(eq=False)
class _Way:
    """Leads to a neighbour that is connected, and to the ones behind it."""

    peer: Peer
    behind: Sequence[Peer]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Relay:
    """Passes a directory on to all nodes of `to`; a neighbour may be silent for a lease (seconds)."""

    def __init__(self, credentials: Credentials, life: str, lease: float, to: Sequence[Peer]) -> None:
        self._credentials = credentials
        self._life = life
        self._lease = lease
        self._to = to
        self._ways: list[_Way] = []
        self.failed: Failures = {}

    async def open(self, name: str, files: tuple[FileEntry, ...]) -> None:
        """Connect to the first of each half that answers."""
        halves = [self._to[place::_WAYS] for place in range(_WAYS)]
        await asyncio.gather(*(self._begin(half, name, files) for half in halves))

    async def send(self, data: bytes) -> None:
        """Pass bytes on, as quickly as the slowest neighbour takes them."""
        await asyncio.gather(*(self._sent(way, data) for way in list(self._ways)))

    async def close(self) -> Failures:
        """Return who has nothing, once all others have all."""
        await asyncio.gather(*(self._closed(way) for way in list(self._ways)))
        return self.failed

    def abort(self) -> None:
        for way in self._ways:
            drop(way.writer)
        self._ways.clear()

    async def _begin(self, peers: Sequence[Peer], name: str, files: tuple[FileEntry, ...]) -> None:
        for place, peer in enumerate(peers):
            behind = peers[place + 1 :]
            hello = Hello(kind="put", life=self._life, name=name, files=files, to=tuple(behind))
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    pair = await self._connected(peer, hello)
            except (OSError, LoradError) as error:
                self.failed[peer.name] = to_wire(as_error(error))
                continue
            self._ways.append(_Way(peer, behind, *pair))
            return

    async def _connected(self, peer: Peer, hello: Hello) -> Pair:
        context = self._credentials.context(peer.certificate)
        reader, writer = await asyncio.open_connection(peer.ip, peer.port, ssl=context, limit=LINE)
        try:
            check_peer(writer, peer.certificate)
            never_hangs(writer, self._lease)
            await write(writer, hello)
            await answer_of(reader, Done)
        except BaseException:
            drop(writer)
            raise
        return reader, writer

    async def _sent(self, way: _Way, data: bytes) -> None:
        try:
            way.writer.write(data)
            async with asyncio.timeout(self._lease):
                await way.writer.drain()
        except OSError as error:
            self._drop(way, error)

    async def _closed(self, way: _Way) -> None:
        """Wait for the answer of a neighbour, which comes when all behind it have answered."""
        depth = 1 + len(way.behind).bit_length()
        try:
            async with asyncio.timeout(self._lease * depth):
                self.failed |= (await answer_of(way.reader, Done)).failed
            drop(way.writer)
        except (OSError, LoradError) as error:
            self._drop(way, error)

    def _drop(self, way: _Way, error: Exception) -> None:
        drop(way.writer)
        if way in self._ways:
            self._ways.remove(way)
            self.failed[way.peer.name] = to_wire(as_error(error))
            broken = PoolLost(f"{way.peer.name} did not pass it on: {error}")
            self.failed |= {peer.name: to_wire(broken) for peer in way.behind}
