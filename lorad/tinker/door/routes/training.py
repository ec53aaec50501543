"""Has the routes that make models and change them.

A numbered request that cannot be done is taken all the same: its future fails, so that no number is missing.
"""

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from lorad.gateway.guard import answer
from lorad.spec.numbers import NAME
from lorad.tinker.door.checkpoints import WEIGHTS, Checkpoint, name_of
from lorad.tinker.door.door import ClientRequest, Door
from lorad.tinker.door.errors import BadRequest, HttpError, cut
from lorad.tinker.door.routes import bodies
from lorad.tinker.door.routes.answers import PROTOBUF
from lorad.tinker.door.state import Model, RequestedLora
from lorad.tinker.door.wire import read_head, read_pass
from lorad.tinker.records import Arguments, Load, Refused, SaveSampler, SaveWeights, Step, Unload

EXPORT = "lorad uploads no checkpoints: `lorad export RUN@VERSION DIR` makes a PEFT directory of one"
_INTEGERS = 1 << 31

_Route = Callable[[Door, ClientRequest], Awaitable[web.Response]]


async def create_model(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.CreateModel)
    session = door.session(request.owner, body.session_id)
    await door.limits(body.base_model)
    lora = body.lora_config or RequestedLora()
    _refuse_lora(lora, body.optimizer_config)
    if (ranks := door.settings.ranks) and lora.rank not in ranks:
        raise HttpError(400, f"lora rank {lora.rank} is not served here: there are {ranks}")
    model = _model(door, session.id, body.model_seq_id, body.base_model, lora, body.user_metadata)
    return _begun(door, model)


async def load_weights(door: Door, request: ClientRequest) -> web.Response:
    """Make a model of a checkpoint; or, for clients before 0.25, load it into a model that was not used."""
    body = bodies.read(request.data, bodies.LoadWeights)
    if body.session_id is None or body.model_seq_id is None:
        if body.model_id is None or body.seq_id is None:
            raise HttpError(422, "load_weights takes session_id and model_seq_id, or model_id and seq_id")
        model = door.models.find(request.owner, body.model_id)
        arguments: Arguments
        try:
            _, directory = await _source(door, request.owner, body)
            if body.seq_id != 1:
                raise HttpError(400, "weights are loaded into a new model only, before anything else")
            arguments = Load(body.path, directory, body.optimizer)
        except HttpError as error:
            arguments = Refused(error.detail)
        return await _submit(door, model, body.seq_id, _digest(request.data), arguments)
    session = door.session(request.owner, body.session_id)
    if body.weights_access_token:
        raise HttpError(400, "weights_access_token is not supported: publish the checkpoint instead")
    source, directory = await _source(door, request.owner, body)
    await door.limits(source.model.base)
    _refuse_lora(source.model.lora, body.optimizer_config)
    model = _model(
        door, session.id, body.model_seq_id, source.model.base, source.model.lora, body.user_metadata
    )
    origin = {"source": body.path, "directory": directory, "optimizer": body.optimizer}
    return _begun(door, msgspec.structs.replace(model, **origin))


async def get_info(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.OfModel)
    model = door.models.find(request.owner, body.model_id)
    data = {"arch": "lora", "model_name": model.base, "tokenizer_id": model.base}
    about = {"type": "get_info", "model_id": model.id, "model_data": data, "model_name": model.base}
    return answer(about | {"is_lora": True, "lora_rank": model.lora.rank})


async def forward_backward(door: Door, request: ClientRequest) -> web.Response:
    if request.http.content_type != PROTOBUF:
        raise HttpError(422, "forward_backward is taken as protobuf: install tinker 0.25 or newer")
    if request.http.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpError(415, "compressed bodies are not taken")
    head = await asyncio.to_thread(read_head, request.data)
    model = door.models.find(request.owner, head.model_id)
    arguments: Arguments
    try:
        arguments = await asyncio.to_thread(read_pass, head, await door.limits(model.base))
    except BadRequest as error:
        arguments = Refused(str(error), poisons=head.backward)
    return await _submit(door, model, head.seq, head.digest, arguments)


async def unload_model(door: Door, request: ClientRequest) -> web.Response:
    """End a model. The client does not number this request, which comes behind all others."""
    body = bodies.read(request.data, bodies.OfModel)
    model = door.models.find(request.owner, body.model_id)
    lane = await door.models.lane(model)
    return await _submit(door, model, lane.last + 1, "unload", Unload())


async def _source(door: Door, owner: str, body: bodies.LoadWeights) -> tuple[Checkpoint, str]:
    """Find the checkpoint to load, and its directory. Raises HttpError."""
    source = await door.checkpoints.find(owner, body.path)
    if source.kind != WEIGHTS and body.optimizer:
        raise HttpError(400, f"{body.path} has no optimizer state: save_state makes one that has")
    return source, str(door.models.runs.home.run(source.model.run).root / source.outcome.directory)


def _numbered(arguments_of: Callable[[bytes, Model], Arguments]) -> _Route:
    """Make a route for a numbered request whose body is JSON."""

    async def route(door: Door, request: ClientRequest) -> web.Response:
        head = bodies.read(request.data, bodies.Numbered)
        digest = _digest(request.data)
        model = door.models.find(request.owner, head.model_id)
        try:
            arguments = arguments_of(request.data, model)
        except HttpError as error:
            arguments = Refused(error.detail)
        except ValueError as error:
            arguments = Refused(cut(str(error)))
        return await _submit(door, model, head.seq_id, digest, arguments)

    return route


async def _submit(door: Door, model: Model, seq: int, digest: str, arguments: Arguments) -> web.Response:
    if not 0 < seq < _INTEGERS:
        raise HttpError(400, f"seq_id {seq} is no number of a request: they begin at 1")
    if model.failed:
        raise HttpError(400, model.failed)
    door.renew_lease(model.session)
    await door.models.submit(model, seq, digest, arguments)
    return answer({"request_id": f"{model.id}:{seq}", "model_id": model.id})


def _begun(door: Door, model: Model) -> web.Response:
    door.renew_lease(model.session)
    door.models.create(model)
    return answer({"request_id": f"{model.id}:0", "model_id": model.id})


def _model(
    door: Door, session: str, number: int, base: str, lora: RequestedLora, metadata: dict[str, Any] | None
) -> Model:
    """Make a model with the id that the client computes by itself."""
    if not 0 <= number < _INTEGERS:
        raise HttpError(400, f"model_seq_id {number} is no number of a model")
    metadata = {str(key): str(value) for key, value in (metadata or {}).items()}
    owner = door.state.sessions[session].owner
    run = metadata.get("name", "")
    taken = {model.run for model in door.state.models.values()}
    if not re.fullmatch(NAME, run) or run in taken or door.models.runs.home.run(run).root.exists():
        run = f"tinker-{session}-{number}"
    return Model(f"{session}:train:{number}", session, owner, run, base, lora, time.time(), metadata)


def _refuse_lora(lora: RequestedLora, optimizer: bodies.OptimizerConfig | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise HttpError(400, f"the optimizer {optimizer.type} is not supported; there is adamw")
    if lora.rank < 1:
        raise HttpError(400, f"lora rank {lora.rank} is not positive")
    if not (lora.train_attn or lora.train_mlp):
        raise HttpError(400, "train_attn or train_mlp must be true: lorad trains no unembedding alone")


def _step_of(data: bytes, _: Model) -> Step:
    body = bodies.read(data, bodies.OptimStepBody)
    if body.adam_params is None:
        raise ValueError("optim_step takes adam_params; there is no other optimizer")
    settings = {name: value for name, value in body.adam_params.items() if name in Step.__struct_fields__}
    if useless := [
        name for name, value in body.adam_params.items() if name not in settings and name != "type" and value
    ]:
        raise ValueError(f"adam_params: {', '.join(sorted(useless))} would change nothing; leave it out")
    step = msgspec.convert({"learning_rate": 1e-4, "type": "step"} | settings, Step)
    if not all(math.isfinite(value) and value >= 0 for value in msgspec.structs.astuple(step)):
        raise ValueError("adam_params: a number is negative or not finite")
    if max(step.beta1, step.beta2) >= 1:
        raise ValueError("adam_params: beta1 and beta2 must be below 1")
    return step


def _save_of(data: bytes, _: Model) -> SaveWeights:
    body = bodies.read(data, bodies.SaveWeightsBody)
    _refuse_ttl(body.ttl_seconds)
    return SaveWeights(name_of(body.path), body.overwrite, body.ttl_seconds, body.user_metadata or {})


def _sampler_of(data: bytes, model: Model) -> SaveSampler:
    body = bodies.read(data, bodies.SaveWeightsForSampler)
    if body.kind != "snapshot":
        raise ValueError(f"kind={body.kind} is not supported by lorad: the weights of a sampler never change")
    _refuse_ttl(body.ttl_seconds)
    metadata = body.user_metadata or {}
    if body.path is not None:
        return SaveSampler(name_of(body.path), "", body.ttl_seconds, metadata)
    if body.sampling_session_seq_id is None:
        raise ValueError("save_weights_for_sampler takes a path, or sampling_session_seq_id")
    sampler = f"{model.session}:sample:{body.sampling_session_seq_id}"
    return SaveSampler("", sampler, None, metadata)


def _refuse_ttl(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < 1e10:
        raise ValueError(f"ttl_seconds {seconds} is no time to live")


def _digest(data: bytes) -> str:
    """Return a digest that a repeated request has, too, even where its sampling session has a new number.

    Raises HttpError 422: also a field that nobody reads must be JSON.
    """
    body = bodies.read(data, dict[str, Any])
    body.pop("sampling_session_seq_id", None)
    return hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()


def _refuse_external(_: bytes, __: Model) -> Arguments:
    raise ValueError(f"save_weights_external: {EXPORT}")


optim_step = _numbered(_step_of)
save_weights = _numbered(_save_of)
save_weights_for_sampler = _numbered(_sampler_of)
save_weights_external = _numbered(_refuse_external)
