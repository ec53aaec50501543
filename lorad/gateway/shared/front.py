"""The front of a home that several users share: who asks, how much, and for whose version. That owner's own
gateway, which runs as them, does the rest; no file of a user is opened here, and nothing of a model is in
this process."""

import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.errors import PoolLost
from lorad.gateway.access import Access
from lorad.gateway.errors import ApiError, from_lorad
from lorad.gateway.guard import EVENT_STREAM, VERSION, add_health, arrived, event, guard, send
from lorad.gateway.limits import BODY_BYTES, CONNECTIONS, MOST_OF_ONE, Limits
from lorad.gateway.models import add_models
from lorad.gateway.params import ModelName, unfit
from lorad.gateway.shared.owners import AGAIN, Owners, raise_file_limit
from lorad.gateway.shared.routes import Routes
from lorad.http.serve import SocketFile, serve
from lorad.protocol.listener import FOR_ALL

log = logging.getLogger(__name__)
_JSON = {"Content-Type": "application/json"}
_PASSED_ON = (VERSION, "Cache-Control", "Retry-After")
_FILES_OF_ONE = 4  # file descriptors of a request, with room
_MOST_REQUESTS = 1 << 12  # of all users


class _Named(msgspec.Struct):
    """All that is read of a request."""

    model: ModelName


@dataclass
class _Front:
    routes: Routes
    owners: Owners
    access: Access
    limits: Limits = field(default_factory=Limits)


@contextlib.asynccontextmanager
async def fronting(home: Home, settings: GatewaySettings) -> AsyncIterator[_Front]:
    for_all = os.environ.get(FOR_ALL) == "1"
    routes = Routes(home)
    limits = Limits(min(_MOST_REQUESTS, raise_file_limit() // _FILES_OF_ONE), MOST_OF_ONE)
    owners = Owners("gateway", home.gateway_socket_of)
    access = Access(settings.tokens, for_all=for_all, private=not for_all)
    front = _Front(routes, owners, access, limits)
    named = SocketFile(home.gateway_socket, 0o666 if for_all else 0o600)
    listeners = [named, settings.fixed_port]
    app = _make_app(front)
    try:
        async with serve(app, listeners, CONNECTIONS, name="the gateway", ends_with_client=True):
            yield front
    finally:
        await front.owners.close()
        await routes.close()


def _make_app(front: _Front) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard(front.access, front.limits)])
    add_health(app)
    add_models(app, front.routes.table, front.access)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        app.router.add_post(path, partial(_forward, front))
    return app


async def _forward(front: _Front, request: web.Request) -> web.StreamResponse:
    body = await arrived(request)
    asker, sees = front.access.owner(request), front.access.viewer(request)
    owner = await front.routes.find(_model_in(body), asker, sees)
    wake, headers = partial(front.routes.ask, owner.version), _JSON | {VERSION: owner.version}
    asked = front.owners.asked(owner.owner_uid, wake, "POST", request.path, data=body, headers=headers)
    async with asked as answer:
        return await _passed_on(request, answer)


def _model_in(body: bytes) -> str:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.ValidationError as error:
        raise unfit(error) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Byte for byte, as they come.

    An answer that breaks off breaks off here as well; a stream says so first.
    """
    is_stream = answer.content_type == EVENT_STREAM
    kind = EVENT_STREAM if is_stream else "application/json"
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind} | headers)
    response.content_length = answer.content_length
    await response.prepare(request)
    # the client has left; the owner's gateway sees its own leave
    with contextlib.suppress(ConnectionResetError):
        try:
            async for data in answer.content.iter_any():
                await send(response, data)
        except aiohttp.ClientError as error:
            log.warning("an answer broke off: %s", error)
            await _broken_off(request, response, is_stream=is_stream)
        await response.write_eof()
    return response


async def _broken_off(request: web.Request, response: web.StreamResponse, *, is_stream: bool) -> None:
    """Raises ConnectionResetError for what no word can be added to."""
    if not is_stream:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer broke off")
    error = PoolLost("the gateway of the version's owner went away", hint=AGAIN)
    await send(response, b"\n\n" + event(from_lorad(error).body))
