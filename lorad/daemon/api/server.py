"""HTTP with JSON over the home's Unix socket: the kernel identifies the caller, `access` decides on
permissions.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from lorad import __version__
from lorad.bounds import BODY_BYTES
from lorad.client.transport import PROTOCOL, PROTOCOL_HEADER, VERSION_HEADER
from lorad.daemon.access import Access
from lorad.daemon.api.authorize import authorize
from lorad.daemon.api.body import read_body
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs import ROUTES
from lorad.daemon.context import Context
from lorad.daemon.counters import metered
from lorad.daemon.process.users import Caller, name_of
from lorad.errors import Conflict, LoradError, NotAllowed, NotFound, to_wire
from lorad.protocol.listener import answers

log = logging.getLogger("lorad.daemon")

UCRED = struct.Struct("3i")
UP_TO_DATE = "Is this lorad up to date?"
UNEXPECTED = "This is a defect of lorad; the daemon's log (logs/daemon.log) has the details."

# a daemon of another protocol is found and replaced by these
OF_ANY_PROTOCOL = ("/v1/status", "/v1/shutdown")

Handler = Callable[[Context, Call], Awaitable[Any]]


def make_app(ctx: Context) -> web.Application:
    """Make the application: the routes of `lorad.client`, one handler each."""
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[metered(ctx.requests.meter), _in_words])
    for method, path, handler, access in ROUTES:
        app.router.add_route(method, path, _endpoint(ctx, handler, access))
    app.router.add_route("*", "/{rest:(?s:.*)}", _endpoint(ctx, _nowhere, Access.ANY))
    app.on_response_prepare.append(_say_version)
    return app


def bind(path: Path, mode: int = 0o600) -> socket.socket:
    """A Unix socket at `path`; by default for its owner alone.

    Raises Conflict when somebody answers there.
    """
    if answers(path):
        raise Conflict(f"another process answers on {path}", hint="`lorad daemon stop` ends it.")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    path.chmod(mode)
    return listener


def _endpoint(
    ctx: Context, handler: Handler, access: Access
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            _refuse_other_protocol(request)
            caller = _caller(request, shared=ctx.users.shared)
            call = Call(request, caller, await read_body(request, ctx.requests.bounds.body))
            authorize(ctx, call, access)
            result = await handler(ctx, call)
            return result if isinstance(result, web.StreamResponse) else _json(result)
        except LoradError as error:
            return _error(error, error.status)
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            return _error(LoradError(f"{type(error).__name__}: {error}", hint=UNEXPECTED), 500)

    return answer


async def _say_version(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[VERSION_HEADER] = __version__


def _refuse_other_protocol(request: web.Request) -> None:
    """Raises Conflict. A request that names no protocol, such as curl's, is accepted."""
    asked = request.headers.get(PROTOCOL_HEADER, str(PROTOCOL))
    if asked != str(PROTOCOL) and request.path not in OF_ANY_PROTOCOL:
        told = (
            f"the daemon (version {__version__}) speaks protocol {PROTOCOL}, and this command protocol "
            f"{asked[:8]}"
        )
        raise Conflict(
            told, hint="`lorad daemon restart` starts the daemon of the version that you call; runs continue."
        )


@web.middleware
async def _in_words(
    request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
) -> web.StreamResponse:
    """Answer in lorad's form what aiohttp itself rejects."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        return _error(
            NotFound(f"{request.method} {request.path}: {error.reason}", hint=UP_TO_DATE), error.status
        )


async def _nowhere(ctx: Context, call: Call) -> None:
    raise NotFound(f"no such request: {call.request.method} {call.request.path}", hint=UP_TO_DATE)


def _caller(request: web.Request, *, shared: bool) -> Caller:
    """Identify the caller.

    Raises NotAllowed for all but the daemon's user and root, unless the daemon is shared.
    """
    uid = peer_uid(request)
    if not shared and uid not in (0, os.getuid()):
        raise NotAllowed(
            f"this daemon belongs to uid {os.getuid()}, you are uid {uid}",
            hint="Use a LORAD_HOME of your own; every user has a daemon of their own.",
        )
    return Caller(uid, name_of(uid))


def peer_uid(request: web.Request) -> int:
    """Find the user of the connecting process, as the kernel saw it connect."""
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
