"""Queue runs, list them, and read what they measured."""

from lorad.client.requests import RunRequest
from lorad.client.shapes import Evaluation, Run, RunDetails, Step
from lorad.client.words import perplexity
from lorad.daemon.access import seen
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.control import removed, replaceable
from lorad.daemon.api.views import history, listed_view, of_row, run_view, show_view
from lorad.daemon.context import Context, Request
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import asked_for, create, make_directory, refuse_used
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.rate import rated
from lorad.daemon.runs.reference import clear, refuse_other_model, settle, staged
from lorad.store import metrics, runs

_MOST_NAMES = 100  # that one request may ask for
_AT_ONCE = 1000  # runs; 635 are read in 2.3 ms; beside a thread that works, each row waits for its turn


async def run(ctx: Context, call: Call) -> Run:
    """Check a spec, preflight it, and queue it as a run.

    Raises SpecError, Conflict (the name is in use, or the run to replace is not over), StorageError, and for
    a reference what `staged` raises; then nothing was made, and nothing removed.
    """
    body = call.json(RunRequest)
    spec = await asked_for(ctx, call.caller, body)
    before = replaceable(ctx, call.caller, str(spec.name)) if body.replace else None
    if before is None:
        refuse_used(ctx, spec)
    refuse_priority(ctx, call.caller, spec)
    reference = await staged(ctx, call.caller, spec, body.cwd)
    try:
        facts = await preflight(ctx, spec, body.cwd, call.caller.uid, reference and reference.directory)
        spec, facts = rated(spec, facts)
        refuse_other_model(reference, facts)
        model = facts.model_path, facts.model_dtype, facts.parameters
        kept = reference and reference.reference
        request = Request(body.cwd, body.source, body.overrides, *model, facts, reference=kept)
        if before is not None:
            await removed(ctx, before.name, call.caller.name)
        refuse_used(ctx, spec)
        directory = make_directory(ctx, spec, body.spec, request)
        settle(reference, directory)
        row = create(ctx, spec, directory, call.caller, facts.warnings)
    finally:
        clear(reference)
    ctx.loop.poke()
    return run_view(row)


async def list_runs(ctx: Context, call: Call) -> list[Run]:
    """List runs, newest first: those of `names`, or the active ones and those of the last day, or `all`.

    limit: how many ended runs at most; 0: no limit.
    """
    if (names := call.text("names")) is not None:
        rows = await ctx.read(runs.list_named, names.split(",")[:_MOST_NAMES])
        return [listed_view(row) for row in seen(ctx, call.caller, rows)]
    everything, limit = call.number("all", 0) != 0, call.number("limit", 0)
    if runs.count_listed(ctx.store, all=everything) <= _AT_ONCE:
        rows = runs.list_runs(ctx.store, all=everything, limit=limit)
    else:
        rows = await ctx.read(runs.list_runs, all=everything, limit=limit)
    return [listed_view(row) for row in seen(ctx, call.caller, rows)]


async def show_run(ctx: Context, call: Call) -> RunDetails:
    """Describe one run in full."""
    run = runs.get(ctx.store, call.run)
    return show_view(ctx, run, await ctx.read(history, run))


async def list_steps(ctx: Context, call: Call) -> list[Step]:
    """List the steps of the surviving lineage."""
    runs.get(ctx.store, call.run)
    after, limit, every = call.number("after", 0), call.number("limit", 10000), call.number("every", 1)
    if every > 1:
        found = await ctx.read(metrics.sparse_steps, call.run, every, after, limit)
    else:
        found = await ctx.read(metrics.steps, call.run, after, limit)
    return [of_row(Step, row) for row in found]


async def list_evals(ctx: Context, call: Call) -> list[Evaluation]:
    """List the evaluations of the surviving lineage."""
    runs.get(ctx.store, call.run)
    rows = await ctx.read(metrics.evals, call.run)
    return [
        of_row(Evaluation, row, perplexity=None if row.nll is None else perplexity(row.nll)) for row in rows
    ]
