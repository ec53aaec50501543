"""The frames protocol on a non-blocking socket.

A slow reader slows down the one who sends to it, nobody else.
"""

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
        self._frames: set[asyncio.Task[None]] = set()

    async def receive(self) -> Call:
        """Return the next call.

        Raises ConnectionError at the end of the stream, BadFrame when it is no call.
        """
        prefix = frames.parse_prefix(await self._exactly(frames.PREFIX.size))
        return frames.decode(prefix, await self._exactly(prefix.body), Call)

    async def send(self, answer: Answer) -> None:
        """Send one answer; returns when the peer's buffer has taken all of it. Frames of several answers
        never mix.

        A frame is sent whole even if its sender is cancelled meanwhile: the other calls of this connection
        continue.
        """
        frame = asyncio.create_task(self._send(frames.encode(answer)))
        self._frames.add(frame)
        frame.add_done_callback(self._sent)
        await asyncio.shield(frame)

    async def settle(self) -> None:
        """Give up what is being sent."""
        for frame in self._frames:
            frame.cancel()
        await asyncio.gather(*self._frames, return_exceptions=True)

    def close(self) -> None:
        self._peer.close()

    async def _send(self, parts: list[bytes | memoryview]) -> None:
        async with self._sending:
            for part in parts:
                await self._loop.sock_sendall(self._peer, part)

    def _sent(self, frame: asyncio.Task[None]) -> None:
        self._frames.discard(frame)
        if not frame.cancelled():
            frame.exception()  # its sender has it, unless it was cancelled

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = await self._loop.sock_recv_into(self._peer, view)
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            view = view[got:]
        return data
