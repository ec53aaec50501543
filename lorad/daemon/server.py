"""HTTP with JSON over the home's Unix socket: who asks is told by the kernel, what they may is decided here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pwd
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from lorad.daemon.context import Context
from lorad.daemon.handlers import ROUTES
from lorad.daemon.request import Call, Caller
from lorad.errors import Conflict, LoradError, NotAllowed, NotFound, SpecError, to_wire
from lorad.protocol.listener import answers

log = logging.getLogger("lorad.daemon")

BODY_BYTES = 4 << 20
BODY_SECONDS = 30.0
UCRED = struct.Struct("3i")
UNEXPECTED = "This is a defect of lorad; the daemon's log (logs/daemon.log) has the details."

Handler = Callable[[Context, Call], Awaitable[Any]]


def make_app(ctx: Context) -> web.Application:
    """The routes of `lorad.client`, one handler each."""
    app = web.Application(client_max_size=BODY_BYTES)
    for method, path, handler in ROUTES:
        app.router.add_route(method, path, _endpoint(ctx, handler))
    app.router.add_route("*", "/{rest:.*}", _endpoint(ctx, _nowhere))
    return app


def bind(path: Path) -> socket.socket:
    """A Unix socket at `path` that only its owner can reach. Raises Conflict when somebody answers there already."""
    if answers(path):
        raise Conflict(f"another process answers on {path}", hint="`lorad daemon stop` ends it.")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    path.chmod(0o600)
    return listener


def _endpoint(ctx: Context, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            call = Call(request, _caller(request), await _body(request))
            result = await handler(ctx, call)
            return result if isinstance(result, web.StreamResponse) else _json(result)
        except LoradError as error:
            return _error(error, error.status)
        except web.HTTPRequestEntityTooLarge:
            return _error(SpecError(f"the request is larger than {BODY_BYTES} bytes", hint="Make it smaller."), 413)
        except TimeoutError:
            return _error(Conflict("the request did not arrive in time", hint="Send it again."), 408)
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            return _error(LoradError(f"{type(error).__name__}: {error}", hint=UNEXPECTED), 500)

    return answer


async def _nowhere(ctx: Context, call: Call) -> None:
    raise NotFound(f"no such request: {call.request.method} {call.request.path}", hint="Is this lorad up to date?")


async def _body(request: web.Request) -> Any:
    """The JSON body, None without one. Raises SpecError."""
    async with asyncio.timeout(BODY_SECONDS):
        data = await request.read()
    try:
        return json.loads(data) if data else None
    except ValueError as error:
        raise SpecError(f"the request is not JSON: {error}", hint="Use the lorad command or lorad.client.") from None


def _caller(request: web.Request) -> Caller:
    """Who is at the other end. Raises NotAllowed for anybody but the daemon's user and root."""
    uid = peer_uid(request)
    if uid not in (0, os.getuid()):
        raise NotAllowed(
            f"this daemon belongs to uid {os.getuid()}, you are uid {uid}",
            hint="Use a LORAD_HOME of your own; every user has a daemon of their own.",
        )
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return Caller(uid, name)


def peer_uid(request: web.Request) -> int:
    """The user of the connecting process, as the kernel saw it connect."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None:
        raise NotAllowed("the connection is gone", hint="Try again.")
    uid: int = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))[1]
    return uid


def _json(result: Any) -> web.Response:
    body = {"items": result} if isinstance(result, list) else result
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _error(error: LoradError, status: int) -> web.Response:
    body = msgspec.json.encode({"error": to_wire(error)})
    return web.Response(body=body, status=status, content_type="application/json")
