"""Has the routes of the door, and checks who asks and how much."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from aiohttp import web

from lorad.box.config import TinkerSettings
from lorad.box.keys import keys_file
from lorad.box.paths import Home
from lorad.http.serve import SocketFile, serve
from lorad.protocol import served
from lorad.tinker.door import guard
from lorad.tinker.door.door import ClientRequest, Door, opened
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.routes import futures, rest, samplers, sessions, training
from lorad.tinker.door.routes.hub import add_hub

log = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 15
_TOKEN_BYTES = 16  # of a token in the JSON of a prompt
_CHECKPOINT = "training_runs/{id}/checkpoints/{kind:weights|sampler_weights}/{name}"

_Route = Callable[[Door, ClientRequest], Awaitable[web.Response]]

_ROUTES: list[tuple[str, str, _Route]] = [
    ("POST", "client/config", sessions.config),
    ("POST", "client/dynamic_config", sessions.dynamic_config),
    ("POST", "telemetry", sessions.telemetry),
    ("GET", "get_server_capabilities", sessions.capabilities),
    ("POST", "create_session", sessions.create),
    ("POST", "session_heartbeat", sessions.heartbeat),
    ("POST", "sessions/{id}/finish", sessions.finish),
    ("POST", "create_model", training.create_model),
    ("POST", "get_info", training.get_info),
    ("POST", "forward_backward", training.forward_backward),
    ("POST", "optim_step", training.optim_step),
    ("POST", "save_weights", training.save_weights),
    ("POST", "save_weights_for_sampler", training.save_weights_for_sampler),
    ("POST", "save_weights_external", training.save_weights_external),
    ("POST", "load_weights", training.load_weights),
    ("POST", "unload_model", training.unload_model),
    ("POST", "retrieve_future", futures.retrieve),
    ("POST", "retrieve_futures", futures.retrieve_many),
    ("POST", "cancel_future", futures.cancel),
    ("POST", "create_sampling_session", samplers.create),
    ("POST", "join_sampling_session", samplers.join),
    ("POST", "asample", samplers.asample),
    ("GET", "training_runs", rest.training_runs),
    ("GET", "training_runs/{id}", rest.training_run),
    ("GET", "training_runs/{id}/checkpoints", rest.run_checkpoints),
    ("GET", "checkpoints", rest.checkpoints),
    ("POST", "weights_info", rest.weights_info),
    ("PUT", f"{_CHECKPOINT}/ttl", rest.set_ttl),
    ("POST", f"{_CHECKPOINT}/publish", rest.publish),
    ("DELETE", f"{_CHECKPOINT}/publish", rest.publish),
    ("DELETE", _CHECKPOINT, rest.delete),
    ("GET", "sessions", rest.sessions),
    ("GET", "sessions/{id}", rest.session),
    ("GET", "samplers/{id}", rest.sampler),
]
_LARGER: dict[_Route, int] = {
    training.forward_backward: guard.BODY_BYTES,
    futures.retrieve_many: 1 << 20,
    sessions.telemetry: 1 << 20,
}
_REFUSED = {
    "forward": "this client is older than 0.25: install tinker 0.25 or newer",
    "copy_weights": "lorad copies no checkpoints: make a model of one, and save it",
    "create_custom_loss": "custom losses run at the client: forward_backward_custom takes a function",
    "auth/token": "lorad knows API keys alone: `lorad tinker keys` makes one",
    "auth/apikey/me": "lorad knows API keys alone",
    "sessions/search": "lorad does not search sessions; list_sessions lists them",
    "sessions/{id}/project": "lorad has no projects",
    "sessions/{id}/trace_export": "lorad keeps no traces of clients",
    "audit": "lorad has no audit log for clients: `lorad events` shows what happened",
    "billing/{rest:.*}": "`lorad bill` shows who used how much",
    "training_runs/{id}/checkpoints/{rest:.*}/external_weights_urls": training.EXPORT,
    "training_runs/{id}/checkpoints/{rest:.*}/archive": training.EXPORT,
}
"""What the client may ask for and the door refuses, with the words for its user."""


def make_app(door: Door, owner_of: Callable[[web.Request], str]) -> web.Application:
    """Make the routes; whoever has no key may only ask for `healthz` and tokenizers of bases.

    Args:
        owner_of: Says who asks, or raises HttpError.
    """

    async def call(route: _Route, request: web.Request) -> web.Response:
        owner = owner_of(request)
        body = await request.read()
        # most bodies are kept for long, and all but passes are read on the event loop
        most = _LARGER.get(route, _SMALL_BYTES)
        if route is samplers.asample:
            most = _SMALL_BYTES + _TOKEN_BYTES * door.settings.context
        if len(body) > most:
            raise HttpError(413, f"{request.path} takes at most {most} bytes, not {len(body)}")
        return await route(door, ClientRequest(owner, request, body))

    app = web.Application(client_max_size=guard.BODY_BYTES, middlewares=[guard.guarded])
    app.router.add_get("/api/v1/healthz", guard.healthz)
    for method, path, route in _ROUTES:
        app.router.add_route(method, f"/api/v1/{path}", partial(call, route))
    for path, why in _REFUSED.items():
        app.router.add_route("*", f"/api/v1/{path}", partial(_refuse, why))
    add_hub(app, door.models.bases)
    return app


async def _refuse(why: str, _: web.Request) -> web.Response:
    raise HttpError(404, why)


@contextlib.asynccontextmanager
async def answering(home: Home, settings: TinkerSettings) -> AsyncIterator[Door]:
    """Serve the door of a home within the block. Raises Conflict when another one is open."""
    async with opened(home, home.tinker, settings) as door:
        app = make_app(door, guard.Keys(keys_file(home, settings)).owner_of)
        listeners = [SocketFile(home.tinker_socket), settings.port]
        async with serve(app, listeners, guard.CONNECTIONS, name="the Tinker door", ends_with_client=True):
            yield door


@contextlib.asynccontextmanager
async def answering_as_owner(home: Home, settings: TinkerSettings, uid: int) -> AsyncIterator[Door]:
    """Serve the door of this process's user, behind the front of a shared home."""
    socket = home.tinker_socket_of(uid)
    table = home.gateway_of(uid) / served.FILE
    async with opened(home, socket.parent, settings, table=table) as door:
        app = make_app(door, guard.behind_front)
        listeners = [SocketFile(socket)]
        async with serve(app, listeners, guard.BEHIND_FRONT, name="the Tinker door", ends_with_client=True):
            yield door
