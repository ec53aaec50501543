"""The front of a home that several users share: it checks who asks, how much, and for whose version.

The gateway of that version's owner, which runs as them, does the rest: the front opens no file of a user and
loads nothing of a model.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from aiohttp import web

from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.errors import PoolLost
from lorad.gateway.access import GatewayAccess
from lorad.gateway.errors import ApiError, from_lorad
from lorad.gateway.guard import EVENT_STREAM, HEALTH, VERSION, arrived, event, guard, health
from lorad.gateway.limits import BODY_BYTES, CONNECTIONS, MOST_OF_ONE, RequestLimits
from lorad.gateway.models import add_models
from lorad.gateway.params import ModelName, unfit
from lorad.gateway.shared.routes import GatewayRoutes
from lorad.http.front import AGAIN, Owners, pass_on, requests_at_once
from lorad.http.serve import SocketFile, serve
from lorad.protocol.listener import FOR_ALL

_PASSED_ON = (VERSION, "Cache-Control", "Retry-After")
_MOST_REQUESTS = 1 << 12  # of all users


class _Named(msgspec.Struct):
    """The only part of a request that the front reads."""

    model: ModelName


@contextlib.asynccontextmanager
async def fronting(home: Home, settings: GatewaySettings) -> AsyncIterator[None]:
    """Serve the front within the block. Raises Conflict when another one answers there."""
    for_all = os.environ.get(FOR_ALL) == "1"
    limits = RequestLimits(requests_at_once(_MOST_REQUESTS), MOST_OF_ONE)
    access = GatewayAccess(settings.tokens, for_all=for_all, private=not for_all)
    listeners = [SocketFile(home.gateway_socket, 0o666 if for_all else 0o600), settings.fixed_port]
    async with (
        contextlib.aclosing(GatewayRoutes(home)) as routes,
        contextlib.aclosing(Owners("gateway", home.gateway_socket_of)) as owners,
    ):
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard(access, limits)])
        app.router.add_get(HEALTH, health)
        add_models(app, routes.table, access)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            app.router.add_post(path, partial(_forward, routes, owners, access))
        async with serve(app, listeners, CONNECTIONS, name="the gateway", ends_with_client=True):
            yield


async def _forward(
    routes: GatewayRoutes, owners: Owners, access: GatewayAccess, request: web.Request
) -> web.StreamResponse:
    """Have the gateway of the version's owner answer; a stream that breaks off says so at its end."""
    body = await arrived(request)
    try:
        model = msgspec.json.decode(body, type=_Named).model
    except msgspec.ValidationError as error:
        raise unfit(error) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    owner = await routes.find(model, access.owner(request), access.viewer(request))
    wake = partial(routes.ask, owner.version)
    headers = {"Content-Type": "application/json", VERSION: owner.version}
    answering = owners.ask(owner.owner_uid, wake, "POST", request.path, data=body, headers=headers)
    async with answering as answer:
        if answer.content_type != EVENT_STREAM:
            return await pass_on(request, answer, _PASSED_ON, content_type="application/json")
        gone = PoolLost("the gateway of the version's owner went away", hint=AGAIN)
        last_words = b"\n\n" + event(from_lorad(gone).body)
        return await pass_on(request, answer, _PASSED_ON, content_type=EVENT_STREAM, last_words=last_words)
