"""The frames protocol on a non-blocking socket. A slow reader slows down the one who sends to it, nobody else."""

from __future__ import annotations

import asyncio
import socket

from lorad.protocol import frames
from lorad.protocol.calls import Answer, Call


class Wire:
    """One connection, seen from the pool."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def receive(self) -> Call:
        """The next call. Raises ConnectionError at the end of the stream, BadFrame when it is no call."""
        prefix = frames.parse_prefix(await self._exactly(frames.PREFIX.size))
        return frames.decode(prefix, await self._exactly(prefix.body), Call)

    async def send(self, answer: Answer) -> None:
        """Returns when the peer's buffer has taken all of it; frames of several answers never mix."""
        async with self._sending:
            for part in frames.encode(answer):
                await self._loop.sock_sendall(self._peer, part)

    def close(self) -> None:
        self._peer.close()

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = await self._loop.sock_recv_into(self._peer, view)
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            view = view[got:]
        return data
