"""The frames protocol on a non-blocking socket. A slow reader slows down the one who sends to it, nobody else."""

from __future__ import annotations

import asyncio
import socket

from lorad.protocol import frames
from lorad.protocol.calls import Answer, Call

JOIN_BELOW = 64 << 10  # bytes; parts of a small frame go out in one write


class Wire:
    """One connection, seen from the pool."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def receive(self) -> Call:
        """The next call. Raises ConnectionError at the end of the stream, BadFrame when it is no call."""
        header_size, count = frames.parse_prefix(await self._exactly(frames.PREFIX.size))
        sizes = frames.parse_sizes(await self._exactly(8 * count), count)
        header = await self._exactly(header_size)
        return frames.decode(header, [await self._exactly(size) for size in sizes], Call)

    async def send(self, answer: Answer) -> None:
        """Returns when the peer's buffer has taken all of it; frames of several answers never mix."""
        parts = frames.encode(answer)
        if sum(len(part) for part in parts) < JOIN_BELOW:
            parts = [b"".join(parts)]
        async with self._sending:
            for part in parts:
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
