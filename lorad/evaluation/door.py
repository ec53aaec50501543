"""A loopback port before the gateway's socket, for suites that know no sockets; it asks for a key."""

import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

import aiohttp
from aiohttp import web

_PASSED_ON = ("Content-Type", "Retry-After")
_MOST_BODY = 8 << 20
_LOCAL = "127.0.0.1"


class Door(NamedTuple):
    """url: of the gateway, without `/v1`."""

    url: str
    key: str


@contextlib.asynccontextmanager
async def opened(socket: str) -> AsyncIterator[Door]:
    """Listen while the context lasts."""
    key = secrets.token_urlsafe(32)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket), timeout=timeout) as session:
        app = web.Application(client_max_size=_MOST_BODY)
        app.router.add_route("*", "/{path:.*}", partial(_pass_on, session, key))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, _LOCAL, 0).start()
            yield Door(f"http://{_LOCAL}:{runner.addresses[0][1]}", key)
        finally:
            await runner.cleanup()


async def _pass_on(session: aiohttp.ClientSession, key: str, request: web.Request) -> web.StreamResponse:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        return web.json_response({"error": {"message": "This port is a suite's alone."}}, status=401)
    body = await request.read()
    asked = session.request(request.method, f"http://lorad{request.path_qs}", data=body)
    async with asked as answer:
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response
