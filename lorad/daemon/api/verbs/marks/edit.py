"""Change what a queued run asks for, without changing what it trains."""

import msgspec
from msgspec.structs import replace

from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.processes import write_json
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.preflight import preflight
from lorad.errors import Conflict, SpecError
from lorad.files import write_whole
from lorad.records.requests import EditRequest
from lorad.records.runs import Run
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.model import to_json
from lorad.spec.text import key_of_override, merged, override
from lorad.states import RunState
from lorad.store import events, runs


async def edit(ctx: Context, call: Call) -> Run:
    """Set keys of a queued run: resources.*, and trainer.steps before its first attempt.

    Raises Conflict when it is not queued, SpecError for other keys and for values that do not fit, and
    NotAllowed for a priority above the caller's.
    """
    overrides = call.json(EditRequest).overrides
    run = runs.get(ctx.store, call.run)
    if run.state != RunState.QUEUED:
        hint = f"`lorad resume {run.name} key=value` changes keys from its next attempt on."
        if not RunState(run.state).is_over:
            hint = f"`lorad pause {run.name}`, and then `lorad resume {run.name} key=value`."
        raise Conflict(f"run {run.name} is {run.state}, and only a queued run can be edited", hint=hint)
    if not overrides:
        raise SpecError("no key is given", hint=f"For example `lorad edit {run.name} resources.priority=2`.")
    for text in overrides:
        key = key_of_override(text)
        is_early = key == "trainer.steps" and run.attempt == 0
        if not key.startswith("resources.") and not is_early:
            why = "it has begun already" if key == "trainer.steps" else "it says what the run trains or where"
            hint = "resources.* can be, and trainer.steps before the first attempt. "
            hint += f"For anything else: `lorad kill {run.name}`, and `lorad run … --replace`."
            raise SpecError(f"override {text}: {key} cannot be edited: {why}", hint=hint)
    before = spec_of(run)
    spec = await in_thread(ctx, call.caller.uid, override, before, overrides)
    refuse_contradictions(spec)
    if spec.resources.priority > before.resources.priority:
        refuse_priority(ctx, call.caller, spec)
    request = replace(request_of(run), overrides=merged(request_of(run).overrides, overrides))
    if spec.resources.devices != before.resources.devices:
        reference = None if request.reference is None else run.dir.reference
        await preflight(ctx, spec, request.cwd, run.owner_uid, reference)
    now = runs.get(ctx.store, run.name)
    if (now.state, now.spec) != (run.state, run.spec):
        raise Conflict(f"run {run.name} changed meanwhile: it is {now.state}", hint="Look, and try again.")
    with ctx.store.write():
        runs.respecify(ctx.store, run.name, spec)
        events.append(ctx.store, run.name, "edited", {"changed": overrides, "by": call.caller.name})
        write_whole(run.dir.spec, to_json(spec))
        write_json(run.dir.root / "request.json", msgspec.to_builtins(request))
    ctx.loop.poke()
    return run_view(ctx, runs.get(ctx.store, call.run))
