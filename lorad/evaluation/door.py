"""A loopback port before the gateway's socket, for suites that know no sockets; it asks for a key."""

import contextlib
import hmac
import secrets
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from lorad.bounds import Bounds
from lorad.http.client import session_over
from lorad.http.front import pass_on
from lorad.http.serve import LOCAL, serve

_PASSED_ON = ("Content-Type", "Retry-After")
_MOST_BODY = 8 << 20
_CONNECTIONS = Bounds(idle=3600.0, write=60.0, of_own=4096)  # a suite asks much at once
_AT_ONCE = 100  # requests to the gateway; the others wait
_GOODBYE_SECONDS = 1.0


class Door(NamedTuple):
    """Where a suite asks: `url` leads to the gateway, without `/v1`."""

    url: str
    key: str


@contextlib.asynccontextmanager
async def opened(gateway: str) -> AsyncIterator[Door]:
    """Listen while the context lasts. gateway: the path of its socket."""
    key = secrets.token_urlsafe(32)
    timeout = aiohttp.ClientTimeout(total=None)
    async with session_over(Path(gateway), timeout, limit=_AT_ONCE) as session:
        app = web.Application(client_max_size=_MOST_BODY)
        app.router.add_route("*", "/{path:.*}", partial(_pass_on, session, key))
        listener = socket.create_server((LOCAL, 0))
        url = f"http://{LOCAL}:{listener.getsockname()[1]}"
        async with serve(app, [listener], _CONNECTIONS, name="the gateway", goodbye=_GOODBYE_SECONDS):
            yield Door(url, key)


async def _pass_on(session: aiohttp.ClientSession, key: str, request: web.Request) -> web.StreamResponse:
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(token.encode(errors="surrogateescape"), key.encode()):
        return web.json_response({"error": {"message": "This port is a suite's alone."}}, status=401)
    body = await request.read()
    asked = session.request(request.method, f"http://lorad{request.path_qs}", data=body)
    async with asked as answer:
        return await pass_on(request, answer, _PASSED_ON)
