"""Has the routes that list and change training runs, checkpoints, sessions and samplers."""

import contextlib
import time
from typing import Any, TypeVar

from aiohttp import web

from lorad.gateway.guard import answer
from lorad.tinker.door.checkpoints import SAMPLER, WEIGHTS, iso, listed, path_of
from lorad.tinker.door.door import ClientRequest, Door
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.routes import bodies
from lorad.tinker.door.state import Model

T = TypeVar("T")
_MOST = 1000  # of a page


def _page(request: ClientRequest, everything: list[T], usual: int) -> tuple[list[T], dict[str, int]]:
    """Return the page of a list that a request asks for, and its cursor. Raises HttpError 422."""
    try:
        limit = int(request.http.query.get("limit", usual))
        offset = int(request.http.query.get("offset", 0))
    except ValueError:
        raise HttpError(422, "limit and offset are numbers") from None
    limit = min(max(limit, 1), _MOST)
    offset = max(offset, 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(everything)}
    return everything[offset : offset + limit], cursor


async def training_runs(door: Door, request: ClientRequest) -> web.Response:
    mine = [model for model in door.state.models.values() if model.owner == request.owner]
    page, cursor = _page(request, mine[::-1], 20)
    return answer({"training_runs": [await _run(door, model) for model in page], "cursor": cursor})


async def training_run(door: Door, request: ClientRequest) -> web.Response:
    return answer(await _run(door, door.models.find(request.owner, request.http.match_info["id"])))


async def _run(door: Door, model: Model) -> dict[str, Any]:
    last = {checkpoint.kind: listed(checkpoint) for checkpoint in await door.checkpoints.of(model)}
    used = 0.0
    with contextlib.suppress(HttpError):  # its run was removed
        used = (await door.models.lane(model)).used
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.owner,
        "is_lora": True,
        "corrupted": bool(model.failed),
        "lora_rank": model.lora.rank,
        "last_request_time": iso(used or model.created),
        "last_checkpoint": last.get(WEIGHTS),
        "last_sampler_checkpoint": last.get(SAMPLER),
        "user_metadata": model.metadata or None,
    }


async def run_checkpoints(door: Door, request: ClientRequest) -> web.Response:
    model = door.models.find(request.owner, request.http.match_info["id"])
    return answer({"checkpoints": list(map(listed, await door.checkpoints.of(model)))})


async def checkpoints(door: Door, request: ClientRequest) -> web.Response:
    mine = [
        checkpoint
        for model in list(door.state.models.values())
        if model.owner == request.owner
        for checkpoint in await door.checkpoints.of(model)
    ]
    mine.sort(key=lambda checkpoint: -checkpoint.at)
    page, cursor = _page(request, mine, 100)
    return answer({"checkpoints": list(map(listed, page)), "cursor": cursor})


async def weights_info(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.OfPath)
    model = (await door.checkpoints.find(request.owner, body.tinker_path)).model
    flags = {name: getattr(model.lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return answer({"base_model": model.base, "is_lora": True, "lora_rank": model.lora.rank} | flags)


async def set_ttl(door: Door, request: ClientRequest) -> web.Response:
    path = await _own(door, request)
    body = bodies.read(request.data, bodies.Ttl)
    if body.ttl_seconds is not None and not 0 < body.ttl_seconds < 1e10:
        raise HttpError(400, f"ttl_seconds {body.ttl_seconds} is no time to live")
    door.state.mark(path, expires=0.0 if body.ttl_seconds is None else time.time() + body.ttl_seconds)
    return web.Response(status=204)


async def publish(door: Door, request: ClientRequest) -> web.Response:
    """Let all owners read a checkpoint, or no longer."""
    door.state.mark(await _own(door, request), public=request.http.method == "POST")
    return web.Response(status=204)


async def delete(door: Door, request: ClientRequest) -> web.Response:
    door.state.mark(await _own(door, request), gone=True)
    return web.Response(status=204)


async def _own(door: Door, request: ClientRequest) -> str:
    parts = request.http.match_info
    path = path_of(parts["id"], parts["kind"], parts["name"])
    return (await door.checkpoints.find(request.owner, path, to_change=True)).path


async def sessions(door: Door, request: ClientRequest) -> web.Response:
    mine = [session.id for session in door.state.sessions.values() if session.owner == request.owner]
    page, cursor = _page(request, mine[::-1], 20)
    return answer({"sessions": page, "cursor": cursor})


async def session(door: Door, request: ClientRequest) -> web.Response:
    about = door.session(request.owner, request.http.match_info["id"])
    samplers = [sampler.id for sampler in door.state.samplers.values() if sampler.session == about.id]
    return answer(
        {
            "training_run_ids": [model.id for model in door.state.of_session(about.id)],
            "sampler_ids": samplers,
            "user_metadata": {str(key): str(value) for key, value in about.metadata.items()},
            "display_name": about.name,
        }
    )


async def sampler(door: Door, request: ClientRequest) -> web.Response:
    about = await door.sampler(request.owner, request.http.match_info["id"])
    return answer({"sampler_id": about.id, "base_model": about.base, "model_path": about.path or None})
