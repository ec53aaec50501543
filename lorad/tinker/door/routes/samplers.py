"""Has the routes that sample. A sampler is a version or a base under a name.

The pool loads the weights of a sampler when it is asked for, so that any number of samplers may be alive.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from aiohttp import web
from msgspec.structs import replace

from lorad.gateway.guard import answer
from lorad.protocol.batch import Sampling
from lorad.tinker.door.checkpoints import SAMPLER
from lorad.tinker.door.door import ClientRequest, Door
from lorad.tinker.door.errors import BadRequest, HttpError
from lorad.tinker.door.routes import bodies
from lorad.tinker.door.sampling import CLONE, Wish
from lorad.tinker.door.state import Sampler
from lorad.tinker.door.wire import Limits, check_tokens
from lorad.tinker.records import Published

_MOST_SAMPLES = 1024
_MOST_TOP = 20
_MOST_SAMPLERS = 1 << 17  # of an owner, of all sessions
_MOST_COPIES = 1 << 12  # of a sampler, in as many processes
_UNSUPPORTED = (
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)


async def create(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.CreateSamplingSession)
    session = door.session(request.owner, body.session_id)
    id = f"{session.id}:sample:{body.sampling_session_seq_id}"
    door.renew_lease(session.id)
    if id not in door.state.samplers:
        if sum(sampler.owner == request.owner for sampler in door.state.samplers.values()) >= _MOST_SAMPLERS:
            raise HttpError(400, f"you have {_MOST_SAMPLERS} samplers; finish the sessions that are over")
        if body.model_path:
            source = await door.checkpoints.find(request.owner, body.model_path)
            if source.kind != SAMPLER or not isinstance(source.outcome, Published):
                raise HttpError(
                    400, f"{body.model_path} is not for sampling: save_weights_for_sampler makes one that is"
                )
            version = f"{source.model.run}@{source.outcome.version}"
            base = source.model.base
            sampler = Sampler(id, session.id, request.owner, base, version, body.model_path)
        else:
            sampler = Sampler(id, session.id, request.owner, body.base_model or "")
            await door.limits(sampler.base)
        door.state.note(sampler)
    return answer({"sampling_session_id": id, "type": "create_sampling_session"})


async def join(door: Door, request: ClientRequest) -> web.Response:
    """Number a copy of a sampler in another process: its requests count from 10^9 times that number."""
    body = bodies.read(request.data, bodies.OfSampler)
    sampler = await door.sampler(request.owner, body.sampling_session_id)
    if sampler.copies >= _MOST_COPIES:
        raise HttpError(400, f"sampler {sampler.id} has {_MOST_COPIES} copies; make another sampler")
    joined = replace(sampler, copies=sampler.copies + 1)
    door.state.note(joined)
    return answer({"client_counter": joined.copies, "type": "join_sampling_session"})


async def asample(door: Door, request: ClientRequest) -> web.Response:
    data = request.data
    body = bodies.read(data, bodies.Sample)
    sampler = await door.sampler(request.owner, body.sampling_session_id)
    if sampler.version in door.cleaning.deleted:
        raise HttpError(404, f"the weights of sampler {sampler.id} were deleted, as its session is over")
    if not 0 <= body.seq_id < CLONE * (sampler.copies + 1):
        raise HttpError(400, f"seq_id {body.seq_id} is no number of a request of sampler {sampler.id}")
    id = f"{sampler.id}:{body.seq_id}"
    digest = hashlib.sha256(data).hexdigest()
    if (earlier := door.samples.find(id)) is None:
        door.samples.refuse_many(sampler.owner)
        limits = await door.limits(sampler.base)
        try:
            wish = await _wish(door, body, sampler, id, limits)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        name = sampler.version or str(door.models.bases[sampler.base])
        if door.samples.find(id) is None:  # the same request may have come twice at a time
            door.samples.start(id, digest, sampler.owner, name, wish)
    elif earlier.digest != digest:
        raise HttpError(400, f"request {body.seq_id} of this sampler was another one")
    sequences = [f"{id}:{index}" for index in range(body.num_samples)]
    return answer({"request_id": id, "sample_sequence_ids": sequences, "type": "sample"})


async def _wish(door: Door, body: bodies.Sample, sampler: Sampler, id: str, limits: Limits) -> Wish:
    """Check a request. Raises BadRequest, ValueError."""
    if unsupported := [name for name in _UNSUPPORTED if getattr(body, name)]:
        raise BadRequest(f"{', '.join(unsupported)}: not supported by lorad")
    if not 1 <= body.num_samples <= _MOST_SAMPLES:
        raise BadRequest(f"num_samples {body.num_samples}: from 1 to {_MOST_SAMPLES} are taken")
    if wrong := [chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"]:
        raise BadRequest(f"prompt has a chunk of {wrong[0]}; only text is supported")
    tokens = np.array([token for chunk in body.prompt.chunks for token in chunk.tokens], np.int64)
    check_tokens(tokens, limits, "prompt")
    params = body.sampling_params
    text = id if params.seed is None else f"seed {params.seed}"  # all that the seeds depend on
    digests = (hashlib.sha256(f"{text} {index}".encode()).digest() for index in range(body.num_samples))
    top = body.topk_prompt_logprobs
    if not 0 <= top <= _MOST_TOP:
        raise BadRequest(f"topk_prompt_logprobs {top}: at most {_MOST_TOP} are given")
    if (room := limits.positions - tokens.size) < 1:
        raise BadRequest("the prompt leaves no room for another token")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest(f"max_tokens {params.max_tokens} is not positive")
    if not 0 <= params.temperature <= 100 or not 0 < params.top_p <= 1:
        raise BadRequest(f"temperature {params.temperature} or top_p {params.top_p} is out of range")
    stop: Sequence[str | int] = [params.stop] if isinstance(params.stop, str) else params.stop or []
    stop_ids = tuple(token for token in stop if isinstance(token, int))
    if params.stop is None:
        base = await door.pools.bases.get(str(door.models.bases[sampler.base]))
        stop_ids = tuple(sorted(base.eos_ids))
    sampling = Sampling(
        min(params.max_tokens or room, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop_token_ids=stop_ids,
        stop=tuple(text for text in stop if isinstance(text, str)),
        stream=False,
    )
    last = body.prompt_logprobs_last_n
    if not body.prompt_logprobs and not top:
        if last is not None:
            raise BadRequest("prompt_logprobs_last_n needs prompt_logprobs")
        last = 0
    elif last is not None and last < 1:
        raise BadRequest(f"prompt_logprobs_last_n {last} is not positive")
    return Wish(
        tokens=tokens.astype(np.int32),
        seeds=np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64),
        sampling=sampling,
        last=tokens.size if last is None else min(last, tokens.size),
        top=top,
    )
