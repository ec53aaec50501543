"""Check a spec, preflight it, and queue it as a run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from msgspec import Struct

from lorad.client.shapes import Run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context, Request
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import anchored, create, fresh_name, make_directory, refuse_used
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.reference import clear, refuse_other_model, settle, staged
from lorad.spec.text import load_task


class Body(Struct):
    """The body of a request for a run.

    cwd: where relative paths of the spec begin.
    """

    spec: str
    source: str
    cwd: str
    overrides: list[str] = []
    name: str | None = None


async def handle(ctx: Context, call: Call) -> Run:
    """Raises SpecError, Conflict (the name is in use), StorageError, and for a reference what `staged`
    raises; then nothing was made.
    """
    body = call.json(Body)
    overrides = [*body.overrides, *([] if body.name is None else [f"name={json.dumps(body.name)}"])]
    spec = await in_thread(
        ctx, call.caller.uid, load_task, body.spec, source=body.source, overrides=overrides
    )
    spec = await in_thread(ctx, call.caller.uid, anchored, spec, Path(body.cwd), ctx.user(call.caller.uid))
    spec = msgspec.structs.replace(spec, name=spec.name or fresh_name(ctx))
    refuse_used(ctx, spec)
    refuse_priority(ctx, call.caller, spec)
    reference = await staged(ctx, call.caller, spec, body.cwd)
    try:
        facts = await preflight(ctx, spec, body.cwd, call.caller.uid, reference and reference.directory)
        refuse_other_model(reference, facts.model_path)
        model = facts.model_path, facts.model_dtype, facts.parameters
        told = reference and reference.reference
        request = Request(body.cwd, body.source, body.overrides, *model, facts, reference=told)
        refuse_used(ctx, spec)
        directory = make_directory(ctx, spec, body.spec, request)
        settle(reference, directory)
        row = create(ctx, spec, directory, call.caller, facts.warnings)
    finally:
        clear(reference)
    ctx.loop.poke()
    return run_view(row)
