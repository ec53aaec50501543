"""The gateway's life: it listens on its socket, and on TCP where it is told to, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lorad.config import GatewaySettings
from lorad.gateway.access import Access
from lorad.gateway.app import Gateway, make_app
from lorad.gateway.limits import CONNECTIONS
from lorad.gateway.resolve import Resolver
from lorad.paths import Home
from lorad.protocol.bounded import Doorkeeper, bounded
from lorad.protocol.listener import FOR_ALL, listen, remove

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 20.0  # for requests under way to end
PORT_SECONDS = 5.0  # between two tries to have a port that somebody else has
LOCAL = "127.0.0.1"


async def serve(home: Home, settings: GatewaySettings) -> None:
    """Raises Conflict when another gateway answers there."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with answering(home, settings):
        log.info("the gateway answers on %s", home.gateway_socket)
        await stopping.wait()
        log.info("the gateway ends")


@asynccontextmanager
async def answering(home: Home, settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """At the end it takes no more requests, and lets those that are under way end."""
    for_all = os.environ.get(FOR_ALL) == "1"
    gateway = Gateway(Resolver(home), Access(settings.tokens, for_all=for_all))
    runner = bounded(make_app(gateway), handler_cancellation=True, shutdown_timeout=GOODBYE_SECONDS)
    await runner.setup()
    path, door = home.gateway_socket, Doorkeeper(runner.server, CONNECTIONS)
    server = await asyncio.get_running_loop().create_unix_server(door, sock=listen(path, 0o666 if for_all else 0o600))
    port = asyncio.create_task(listen_on_port(door, settings.port)) if settings.port else None
    try:
        yield gateway
    finally:
        server.close()
        remove(path)
        if port is not None:
            port.cancel()
            await asyncio.gather(port, return_exceptions=True)
        await runner.cleanup()
        await gateway.close()


async def listen_on_port(door: Doorkeeper, port: int) -> None:
    """Until it is cancelled. A port that is taken is tried again, while the socket goes on."""
    is_told = False
    while True:
        try:
            server = await asyncio.get_running_loop().create_server(door, LOCAL, port)
        except OSError as error:
            if not is_told:
                log.error("nothing is served on %s:%d: %s", LOCAL, port, error.strerror)
            is_told = True
            await asyncio.sleep(PORT_SECONDS)
            continue
        log.info("the gateway answers on http://%s:%d/v1", LOCAL, port)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
