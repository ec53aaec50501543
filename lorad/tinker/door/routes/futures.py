"""Has the routes by which the client waits: held for a while, then answered with 408 and the reason."""

from aiohttp import web

from lorad.gateway.guard import answer
from lorad.tinker.door.door import ClientRequest, Door
from lorad.tinker.door.errors import HttpError, unknown
from lorad.tinker.door.routes import bodies
from lorad.tinker.door.routes.answers import failed, of_outcome, protobuf, try_again


async def retrieve(door: Door, request: ClientRequest) -> web.Response:
    body = bodies.read(request.data, bodies.OfRequest)
    of, _, number = body.request_id.rpartition(":")
    if not number.isdecimal() or len(number) > 18:
        raise unknown("request", body.request_id)
    if ":sample:" in of:
        sampled = door.samples.find(body.request_id)
        if sampled is None or sampled.owner != request.owner:
            # the client asks for the same samples again, under a new number
            raise HttpError(410, "this request is not known any more")
        if not await sampled.wait(door.hold):
            return try_again(body.request_id, sampled.reason)
        return failed(*sampled.error) if sampled.error is not None else protobuf(sampled.body)
    model = door.models.find(request.owner, of)
    door.renew_lease(model.session)
    outcome, reason = await door.models.result(model, int(number), door.hold)
    if outcome is None:
        return try_again(body.request_id, reason)
    return of_outcome(model, outcome)


async def retrieve_many(door: Door, request: ClientRequest) -> web.Response:
    """Say which requests of a sampler ended after the client's cursor."""
    body = bodies.read(request.data, bodies.RetrieveFutures)
    sampler = await door.sampler(request.owner, body.target.sampling_session_id)
    if not 0 <= body.target.cloned_sampler_id <= sampler.copies:
        raise unknown(f"copy of {sampler.id}", str(body.target.cloned_sampler_id))
    door.renew_lease(sampler.session)
    door.samples.forget(body.retrieved_request_ids, request.owner)
    seconds = 0.0 if body.timeout == 0 else door.hold
    ended, cursor = await door.samples.wait_for_ended(
        sampler.id, body.target.cloned_sampler_id, body.prev_cursor, seconds
    )
    completions = [
        {"state": "finished", "request_id": id, "response_payload_uncompressed_size": size}
        for id, size in ended
    ]
    return answer({"completions": completions, "cursor": cursor})


async def cancel(door: Door, request: ClientRequest) -> web.Response:
    """End a request for samples whose client left; a request of a model goes on."""
    body = bodies.read(request.data, bodies.OfRequest)
    door.samples.cancel(request.owner, body.request_id)
    return web.Response(status=204)
