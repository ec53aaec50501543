"""The routes, and what all answers have in common: who may have them, and what errors look like."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from aiohttp import web

from lorad.bounds import Bounds
from lorad.box.config import TinkerSettings
from lorad.box.paths import Home
from lorad.errors import LoradError, NotFound
from lorad.gateway.errors import ApiError
from lorad.gateway.server import listening
from lorad.tinker.door.door import Asked, Door, opened
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.keys import KEYS, Keys
from lorad.tinker.door.routes import futures, rest, samplers, sessions, training
from lorad.tinker.door.routes.answers import answer
from lorad.tinker.door.routes.hub import add_hub
from lorad.tinker.door.wire import BadRequest

log = logging.getLogger(__name__)

_BODY_BYTES = 64 << 20  # the client cuts its requests at about 5 MB, and a long datum is not cut
_SMALL_BYTES = 1 << 20
_LARGE = (training.forward_backward, samplers.asample)
_CHECKPOINT = "training_runs/{id}/checkpoints/{kind:weights|sampler_weights}/{name}"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_Route = Callable[[Door, Asked], Awaitable[web.Response]]

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


@web.middleware
async def _guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Let nothing but the client's errors out."""
    try:
        return await handler(request)
    except HttpError as error:
        return answer({"detail": error.detail}, error.status)
    except BadRequest as error:
        return answer({"detail": str(error)}, 400)
    except ApiError as error:
        return answer({"detail": error.message}, error.status)
    except NotFound as error:
        return answer({"detail": error.in_full}, 404)
    except web.HTTPRequestEntityTooLarge:
        return answer({"detail": f"the request is larger than {_BODY_BYTES} bytes"}, 413)
    except web.HTTPException as error:
        text = f"{request.method} {request.path} is not supported by lorad: {error.reason}"
        return answer({"detail": text}, error.status)
    except (LoradError, OSError) as error:  # a full disk, a daemon away: the client asks again
        log.exception("%s %s", request.method, request.path)
        return answer({"detail": str(error)}, 503)
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return answer({"detail": "this is a defect of lorad; the log of its door has the details"}, 500)


def make_app(door: Door, keys: Keys) -> web.Application:
    """Make the routes; whoever has no key gets past none but `healthz` and tokenizers of bases."""

    async def call(route: _Route, request: web.Request) -> web.Response:
        owner = keys.owner(request.headers.get("X-API-Key", ""))
        asked = Asked(
            owner,
            request.method,
            await _body(request, route),
            request.headers,
            request.match_info,
            request.query,
            request.content_type,
        )
        return await route(door, asked)

    app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_guarded])
    app.router.add_get("/api/v1/healthz", _healthz)
    for method, path, route in _ROUTES:
        app.router.add_route(method, f"/api/v1/{path}", partial(call, route))
    for path, why in _REFUSED.items():
        app.router.add_route("*", f"/api/v1/{path}", partial(_refuse, why))
    add_hub(app, door.bases)
    return app


async def _body(request: web.Request, route: _Route) -> bytes:
    """Raises HttpError 413: what is kept of small requests is kept for long."""
    body = await request.read()
    if len(body) > _SMALL_BYTES and route not in _LARGE:
        raise HttpError(413, f"{request.path} takes at most {_SMALL_BYTES} bytes, not {len(body)}")
    return body


async def _healthz(_: web.Request) -> web.Response:
    return answer({"status": "ok"})


async def _refuse(why: str, _: web.Request) -> web.Response:
    raise HttpError(404, why)


@contextlib.asynccontextmanager
async def answering(home: Home, settings: TinkerSettings) -> AsyncIterator[Door]:
    """The door of a home within the block. Raises Conflict when another one is open."""
    bounds = Bounds(idle=75.0, write=60.0, of_own=4096)
    async with opened(home, settings) as door:
        app = make_app(door, Keys(settings.keys or home.tinker / KEYS))
        async with listening(app, home.tinker_socket, bounds, port=settings.port):
            yield door
