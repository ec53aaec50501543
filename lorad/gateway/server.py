"""Runs a gateway until SIGTERM: it listens on its socket, and on TCP if a port is set."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from lorad.bounds import Bounds
from lorad.protocol.bounded import Doorkeeper, Entrance, bounded
from lorad.protocol.heartbeat import HEART
from lorad.protocol.listener import listen, remove

log = logging.getLogger(__name__)

_LOOP_SECONDS = 1.0  # between two signs of life of the event loop
_GOODBYE_SECONDS = 20.0  # for requests under way to end
_PORT_SECONDS = 5.0  # between two tries to have a port that somebody else has
_LOCAL = "127.0.0.1"


async def serve(gateway: contextlib.AbstractAsyncContextManager[object]) -> None:
    """Raises Conflict when another one answers there."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with gateway:
        while not stopping.is_set():
            HEART.looped()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _LOOP_SECONDS)
        log.info("the gateway ends")


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    path: Path,
    bounds: Bounds,
    *,
    mode: int = 0o600,
    port: int | socket.socket | None = None,
) -> AsyncIterator[None]:
    """Serve until the context ends; then take no more requests, and let those under way finish.

    port: a number, or a socket that listens.
    """
    runner = bounded(app, handler_cancellation=True, shutdown_timeout=_GOODBYE_SECONDS)
    await runner.setup()
    door = Doorkeeper(runner.server, bounds)
    entrance = Entrance(door, listen(path, mode))
    log.info("the gateway answers on %s", path)
    on_port = asyncio.create_task(_listen_on_port(door, port)) if port else None
    try:
        yield
    finally:
        entrance.close()
        remove(path)
        if on_port is not None:
            on_port.cancel()
            await asyncio.gather(on_port, return_exceptions=True)
        if isinstance(port, socket.socket):
            port.close()
        await runner.cleanup()


async def _listen_on_port(door: Doorkeeper, port: int | socket.socket) -> None:
    """Listen until cancelled. If the port is taken, try again; the socket keeps working meanwhile."""
    is_logged = False
    while True:
        try:
            server = await _server_on(door, port)
        except OSError as error:
            if not is_logged:
                log.error("nothing is served on %s:%s: %s", _LOCAL, port, error.strerror)
            is_logged = True
            await asyncio.sleep(_PORT_SECONDS)
            continue
        log.info("the gateway answers on http://%s:%d/v1", *server.sockets[0].getsockname())
        try:
            await asyncio.Event().wait()
        finally:
            server.close()


async def _server_on(door: Doorkeeper, port: int | socket.socket) -> asyncio.Server:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    if isinstance(port, int):
        return await loop.create_server(door, _LOCAL, port)
    return await loop.create_server(door, sock=port)
