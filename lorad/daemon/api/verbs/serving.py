"""Bring up what a gateway needs for a model, and stop serving it."""

from pathlib import Path

from lorad.daemon.access import find_alias, must_own, of_run, owns, seen, sees
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.check import prepare_request
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.runs.create import anchored
from lorad.daemon.runs.take_in import take_in_or_end
from lorad.daemon.runs.versions import await_bytes, find_version, in_hand
from lorad.daemon.services.door import DOOR
from lorad.daemon.services.gateway import want_gateway_of
from lorad.daemon.services.service import need
from lorad.daemon.serving.borrow_pool import hold_pool, is_chat, load, staged
from lorad.daemon.storage.prune import prune
from lorad.errors import NotFound
from lorad.protocol.listener import uid_named
from lorad.records.requests import DoorRequest, ModelRequest, OwnerRequest, RunRequest
from lorad.records.versions import DoorOwner, LoadedModel, ServingOwner, StoppedServing
from lorad.spec.text import load_spec
from lorad.states import RunState
from lorad.store import events, runs


async def bring_up(ctx: Context, call: Call) -> LoadedModel:
    """Start the pool of a model and load it there. Raises what `hold_pool` and `load` raise, and NotFound."""
    model = call.json(ModelRequest).model
    try:
        version = find_version(ctx, call.caller, model)
    except NotFound:  # its driver may have written of it since the last look at the journal
        named = runs.find(ctx.store, model.partition("@")[0])
        if named is None or not (named.state.is_active and sees(ctx, call.caller, named.owner_uid)):
            raise
        with ctx.store.write(durable=False):
            fresh = take_in_or_end(ctx, named)
        if any(record.kind == "checkpoint" for record in fresh):
            prune(ctx, named)
        version = find_version(ctx, call.caller, model)
    run = runs.get(ctx.store, version.run)
    with in_hand(ctx, version):
        async with hold_pool(ctx, run) as pool:
            refuse_other_base(ctx, run, pool)
            await await_bytes(ctx, version)
            await load(ctx, pool, version, keep=version.pinned or bool(version.aliases))
    return LoadedModel(
        model=model,
        run=version.run,
        version=version.version,
        sha256=version.sha256,
        socket=pool.setup.socket,
        model_path=request_of(run).model_path,
        chat_template=await is_chat(ctx, run),
    )


async def bring_up_base(ctx: Context, call: Call) -> LoadedModel:
    """Start the pool that runs of a spec would have, to sample from its base."""
    body = call.json(RunRequest)
    uid = call.caller.uid
    spec = await in_thread(ctx, uid, load_spec, body.spec, source=body.source, overrides=body.overrides)
    spec = await in_thread(ctx, uid, anchored, spec, Path(body.cwd), ctx.user(uid))
    spec, request = await prepare_request(ctx, uid, spec, body)
    with staged(ctx, uid, "base", spec, request) as row:
        async with hold_pool(ctx, row) as pool:
            return LoadedModel(
                model=spec.model.path,
                run="",
                version=0,
                sha256="",
                socket=pool.setup.socket,
                model_path=request.model_path,
                chat_template=False,
            )


async def find_owner(ctx: Context, call: Call) -> ServingOwner:
    """Find the owner of a model that the asker may see, and have the owner's gateway up. Raises NotFound."""
    body = call.json(OwnerRequest)
    uid = uid_named(body.asker) if body.asker else call.caller.uid
    asker = Caller(-1 if uid is None else uid, body.asker or call.caller.name)
    version = find_version(ctx, asker, body.model)
    want_gateway_of(ctx, version.owner_uid)
    return ServingOwner(version.name, version.owner_uid)


async def find_door(ctx: Context, call: Call) -> DoorOwner:
    """Find the user whose key the front of the tinker doors got, and have their door up. Raises NotFound."""
    owner = call.json(DoorRequest).owner
    uid = uid_named(owner)
    if uid is None:
        raise NotFound(f"the key is {owner}'s, who is no user of this machine")
    need(ctx, DOOR, [uid])
    ctx.loop.poke()
    return DoorOwner(uid)


async def stop_serving(ctx: Context, call: Call) -> StoppedServing:
    """Let the pools of a run, of an alias, or of the caller's runs on a base end when they are idle. Aliases
    stay, and requests for them start a pool.

    Raises NotFound, NotAllowed.
    """
    model = call.json(ModelRequest).model
    serving = seen(ctx, call.caller, runs.that_serve(ctx.store))
    alias = find_alias(ctx, call.caller, model)
    named = {model, alias.run} if alias else {model}
    meant = [run for run in serving if run.name in named or spec_of(run).model.path == model]
    names = [run.name for run in [run for run in meant if owns(ctx, call.caller, run.owner_uid)] or meant]
    if not names:
        served = ", ".join(dict.fromkeys(f"{run.name} ({spec_of(run).model.path})" for run in serving))
        raise NotFound(f"nothing named {model} is being served", hint=f"Served: {served or 'nothing'}.")
    must_own(ctx, call.caller, *(of_run(ctx, call.caller, run) for run in serving if run.name in names))
    with ctx.store.write():
        for name in names:
            columns = {"waiting": ""} if RunState(runs.get(ctx.store, name).state).is_over else {}
            runs.set_fields(ctx.store, name, serving=0, **columns)
            ctx.serving.pauses.pop(name, None)
            events.append(ctx.store, name, "serving", {"stopped": True, "by": call.caller.name})
        for pool in ctx.pools.values():
            pool.serves -= {*names}
    ctx.loop.poke()
    return StoppedServing(model, names)
