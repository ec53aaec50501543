"""Has the routes about the client itself: its configuration, and sessions, which are leases."""

import re
import secrets
import time

from aiohttp import web
from msgspec.structs import replace

from lorad.gateway.guard import answer
from lorad.tinker.door.door import ClientRequest, Door
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.routes import bodies
from lorad.tinker.door.state import Session

_TRIED = (0, 25), (0, 38)  # the oldest and the newest client that `make tinker` runs
_MOST_SESSIONS = 256  # of one owner that are alive
_MOST_SAMPLES = 512  # requests for samples that a client has under way
_UNEMBED = (
    "lorad trains no adapter on the unembedding (lm_head): train_unembed has no effect. alpha is 32 whatever "
    "the rank."
)


async def config(door: Door, request: ClientRequest) -> web.Response:
    """Tell the client how to behave; for what is left out it has its own defaults."""
    return answer(
        {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "parallel_fwdbwd_chunks": True,
            # each sample is polled for: its client hears why it waits, and that a killed door forgot it
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": True,
            "sample_max_concurrent_requests": _MOST_SAMPLES,
            "custom_loss_server_side": False,
        }
    )


async def dynamic_config(door: Door, request: ClientRequest) -> web.Response:
    return answer({"refresh_interval_sec": 3600, "sample_cancel_enabled": True})


async def capabilities(door: Door, request: ClientRequest) -> web.Response:
    models = [
        {
            "model_name": name,
            "max_context_length": (await door.limits(name)).positions,
            "trainable": True,
            "sampleable": True,
        }
        for name in door.models.bases
    ]
    return answer({"supported_models": models})


async def create(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.CreateSession)
    # the client repeats the request with the same key when an answer was lost
    key = request.http.headers.get("X-Idempotency-Key", secrets.token_hex())
    session = door.idempotent.get((request.owner, key))
    if session is None:
        alive = sum(door.state.sessions[id].owner == request.owner for id in door.state.heard_at)
        if alive >= _MOST_SESSIONS:
            text = f"{alive} of your sessions are alive; close some, or wait until they are silent"
            raise HttpError(400, text)
        session = secrets.token_hex(8)
        for old in [pair for pair, id in door.idempotent.items() if id not in door.state.heard_at]:
            del door.idempotent[old]
        door.idempotent[request.owner, key] = session
        metadata = body.user_metadata or {}
        note = Session(session, request.owner, time.time(), metadata, body.tags, body.display_name)
        door.state.note(replace(note, project=body.project_id))
    door.renew_lease(session)
    warning = None
    version = re.match(r"(\d+)\.(\d+)", body.sdk_version)
    oldest, newest = _TRIED
    if version is None or not oldest <= (int(version[1]), int(version[2])) <= newest:
        tried = " to ".join(".".join(map(str, each)) for each in _TRIED)
        warning = f"lorad was tried with tinker {tried}; this is {body.sdk_version}"
    about = {"session_id": session, "type": "create_session", "info_message": _UNEMBED}
    return answer(about | {"warning_message": warning})


async def heartbeat(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.OfSession)
    session = door.session(request.owner, body.session_id)
    if session.finished:
        raise HttpError(410, "this session has finished")
    door.renew_lease(session.id)
    return answer({"type": "session_heartbeat"})


async def finish(door: Door, request: ClientRequest) -> web.Response:
    """End a session, whose models are parked soon; the first reason counts."""
    session = door.session(request.owner, request.http.match_info["id"])
    body = bodies.read(request.data, bodies.Finish)
    if not session.finished:
        door.state.note(replace(session, finished=body.reason.type))
    return web.Response(status=204)


async def telemetry(door: Door, request: ClientRequest) -> web.Response:
    """Drop what the client says of itself, which has tracebacks and paths of its user."""
    return answer({"status": "accepted"})
