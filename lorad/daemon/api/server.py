"""HTTP with JSON over the home's Unix socket: the kernel says who asks, and `access` what they may do."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from lorad import __version__
from lorad.bounds import BODY_BYTES
from lorad.client.transport import LINES, PROTOCOL, PROTOCOL_HEADER, VERSION_HEADER
from lorad.daemon.access import (
    Access,
    Subject,
    find_alias,
    find_pool,
    find_run,
    must_be_admin,
    must_own,
    of_alias,
    of_run,
)
from lorad.daemon.api.call import Call, read_body
from lorad.daemon.api.lines import in_lines
from lorad.daemon.api.verbs import ROUTES, SLOW
from lorad.daemon.context import Context
from lorad.daemon.counters import metered
from lorad.daemon.process.causes import in_words_of
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.versions import find_version
from lorad.errors import Conflict, LoradError, NotAllowed, NotFound
from lorad.http.bounded import in_words
from lorad.http.serve import peer_uid
from lorad.protocol.listener import user_name
from lorad.store import runs

log = logging.getLogger("lorad.daemon")

_UP_TO_DATE = "Is this lorad up to date?"
_UNEXPECTED = "This is a defect of lorad; the daemon's log (logs/daemon.log) has the details."

_OF_ANY_PROTOCOL = ("/v1/status", "/v1/shutdown")  # clients find and replace an older daemon by these

_Handler = Callable[[Context, Call], Awaitable[Any]]


def make_app(ctx: Context) -> web.Application:
    """Make the application: the routes of `lorad.client`, one handler each."""
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[metered(ctx.requests.meter), _in_words])
    for method, path, handler, access in ROUTES:
        app.router.add_route(method, path, _endpoint(ctx, handler, access))
    app.router.add_route("*", "/{rest:(?s:.*)}", _endpoint(ctx, _nowhere, Access.ANY))
    app.on_response_prepare.append(_say_version)
    return app


def _endpoint(
    ctx: Context, handler: _Handler, access: Access
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        if handler in SLOW and request.headers.get("Accept") == LINES:
            return await in_lines(request, handle(request))
        return await handle(request)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            protocol = request.headers.get(PROTOCOL_HEADER, str(PROTOCOL))
            if protocol != str(PROTOCOL) and request.path not in _OF_ANY_PROTOCOL:
                both = f"protocol {PROTOCOL}, and this command protocol {protocol[:8]}"
                hint = "`lorad daemon restart` starts the daemon of the version that you call; runs continue."
                raise Conflict(f"the daemon (version {__version__}) speaks {both}", hint=hint)
            uid = peer_uid(request)
            if uid is None:
                raise NotAllowed("the connection is gone", hint="Try again.")
            ctx.users.refuse_stranger(uid)
            caller = Caller(uid, user_name(uid))
            call = Call(request, caller, await read_body(request, ctx.requests.bounds.body))
            if access is Access.ADMIN:  # handlers check what only the body names: `must_own`, `find_version`
                must_be_admin(ctx, caller)
            subject = _subject_of(ctx, call) if access in (Access.READ, Access.OWN) else None
            if access is Access.OWN and subject is not None:
                must_own(ctx, caller, subject)
            result = await handler(ctx, call)
            if isinstance(result, web.StreamResponse):
                return result
            body = {"items": result} if isinstance(result, list) else result
            return web.Response(body=msgspec.json.encode(body), content_type="application/json")
        except LoradError as error:
            return in_words(error, error.status)
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            words = f"{type(error).__name__}: {error}"
            cause = in_words_of(words)  # the machine ran out of something, or lorad has a defect
            if cause is None:
                return in_words(LoradError(words, hint=_UNEXPECTED), 500)
            return in_words(LoradError(f"{cause.what} ({words})", hint=cause.advice), 500)

    return answer


def _subject_of(ctx: Context, call: Call) -> Subject | None:
    """Find what a request is about; None where that is no single thing, or an alias or pool that does not
    exist for the caller. Raises NotFound.

    A `run` of the query counts only where the path names nothing: else it would replace the subject.
    """
    named = call.request.match_info
    caller = call.caller
    if run := named.get("run") or (None if named else call.text("run")):
        return of_run(ctx, caller, find_run(ctx, caller, run))
    if version := named.get("version"):
        row = find_version(ctx, caller, version)
        return of_run(ctx, caller, runs.get(ctx.store, row.run))
    if alias := find_alias(ctx, caller, named.get("alias", "")):
        return of_alias(alias)
    pool = find_pool(ctx, caller, named.get("pool", ""))
    return Subject(f"pool {pool.id}", pool.setup.owner) if pool else None


async def _say_version(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[VERSION_HEADER] = __version__


@web.middleware
async def _in_words(
    request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
) -> web.StreamResponse:
    """Answer in lorad's form what aiohttp itself rejects."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        return in_words(NotFound(text, hint=_UP_TO_DATE), error.status)


async def _nowhere(ctx: Context, call: Call) -> None:
    raise NotFound(f"no such request: {call.request.method} {call.request.path}", hint=_UP_TO_DATE)
