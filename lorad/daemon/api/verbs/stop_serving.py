"""Let the pool of a base, or of one adapter, end when it is idle."""

from __future__ import annotations

from msgspec import Struct

from lorad.client.shapes import StoppedServing
from lorad.daemon.access import must_own, of_run, owns
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, spec_of
from lorad.daemon.serving.keep_up import end_serving
from lorad.errors import NotFound
from lorad.store import aliases, events, runs
from lorad.store.rows import RunRow


class Body(Struct):
    """A base as it was served, or a name under which an adapter is."""

    model: str


async def handle(ctx: Context, call: Call) -> StoppedServing:
    """Stop serving what `model` names: a run, an alias, or the caller's runs on a base.

    Raises NotFound, NotAllowed.
    """
    model, serving = call.json(Body).model, runs.that_serve(ctx.store)
    meant = [run for run in serving if is_meant(ctx, run, model)]
    names = [run.name for run in [run for run in meant if owns(ctx, call.caller, run.owner_uid)] or meant]
    if not names:
        known = ", ".join(dict.fromkeys(f"{run.name} ({spec_of(run).model.path})" for run in serving))
        raise NotFound(f"nothing named {model} is being served", hint=f"Served: {known or 'nothing'}.")
    must_own(ctx, call.caller, *(of_run(run) for run in serving if run.name in names))
    with ctx.store.write():
        end_serving(ctx, names)
        for name in names:
            events.append(ctx.store, name, "serving", {"stopped": True, "by": call.caller.name})
    ctx.loop.poke()
    return StoppedServing(model, names)


def is_meant(ctx: Context, run: RunRow, model: str) -> bool:
    alias = aliases.find(ctx.store, model)
    return model in (run.name, spec_of(run).model.path) or (alias is not None and alias.run == run.name)
