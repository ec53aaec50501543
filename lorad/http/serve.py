"""Serves an application on Unix sockets and on ports of the loopback, and says who asks."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from lorad.bounds import Bounds
from lorad.http.bounded import Doorkeeper, Entrance
from lorad.protocol.listener import ADVICE, listen, remove, uid_of

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
_LINGER = 0.5  # seconds for which what a refused request still sends is read
_GOODBYE_SECONDS = 20.0  # for requests under way to end
_TAKE_SECONDS = 60.0  # for a client to take what was sent to it
_PORT_SECONDS = 5.0  # between two tries to have a port that somebody else has


@dataclass(frozen=True)
class SocketFile:
    """Where a Unix socket is to be, for as long as it is served.

    mode: who may connect; by default its owner and root.
    advice: how to end a process that answers there already.
    """

    path: Path
    mode: int = 0o600
    advice: str = ADVICE


Listener = SocketFile | socket.socket | int | None


@contextlib.asynccontextmanager
async def serve(
    app: web.Application,
    listeners: Sequence[Listener],
    bounds: Bounds,
    *,
    name: str,
    goodbye: float = _GOODBYE_SECONDS,
    ends_with_client: bool = False,
) -> AsyncIterator[None]:
    """Serve within the block; then take no more requests, and let those under way finish.

    Compressed bodies stay packed: a kilobyte of gzip can be a gigabyte.

    listeners: Unix sockets, bound sockets of the loopback, and numbers of its ports, or None; a port that
        somebody else has is tried again and again, and the others work meanwhile.
    name: what serves, for the log.
    goodbye: seconds for requests under way to end.
    ends_with_client: a handler is cancelled when its client leaves.

    Raises Conflict when another process answers on one of the Unix sockets.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        lingering_time=_LINGER,
        auto_decompress=False,
        handler_cancellation=ends_with_client,
        shutdown_timeout=goodbye,
    )
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        door = Doorkeeper(runner.server, bounds)

        def enter(listener: socket.socket, path: Path | None = None) -> None:
            place = path or "http://{}:{}".format(*listener.getsockname())
            stack.push_async_callback(Entrance(door, listener).close)
            log.info("%s answers on %s", name, place)

        async def enter_by_port(port: int) -> None:
            is_logged = False
            while True:
                try:
                    listener = socket.create_server((LOCAL, port))
                    break
                except OSError as error:
                    if not is_logged:
                        log.error("%s cannot be had on port %d: %s", name, port, error.strerror)
                    is_logged = True
                await asyncio.sleep(_PORT_SECONDS)
            enter(listener)

        for listener in listeners:
            if isinstance(listener, SocketFile):
                bound = listen(listener.path, listener.mode, advice=listener.advice)
                stack.callback(remove, listener.path)
                enter(bound, listener.path)
            elif isinstance(listener, socket.socket):
                enter(listener)
            elif listener is not None:
                stack.callback(asyncio.create_task(enter_by_port(listener)).cancel)
        await asyncio.sleep(0)  # for the first try of each port
        yield


def peer_uid(request: web.Request) -> int | None:
    """Return the user who asks over a Unix socket, as the kernel saw it connect; None over a port."""
    peer: socket.socket | None = request.transport.get_extra_info("socket") if request.transport else None
    return uid_of(peer) if peer is not None and peer.family == socket.AF_UNIX else None


async def send(response: web.StreamResponse, data: bytes) -> None:
    """Send at once, in one write. Raises ConnectionResetError if the client does not read."""
    try:
        async with asyncio.timeout(_TAKE_SECONDS):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client does not read") from None
