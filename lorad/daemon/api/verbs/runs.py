"""Queue runs, list them, and read what they measured."""

import asyncio
from collections.abc import Sequence
from difflib import get_close_matches

import msgspec

from lorad.client.columns import COLUMNS as LISTED
from lorad.client.words import perplexity
from lorad.daemon.access import seen, sees_all
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.check import prepare_request
from lorad.daemon.api.verbs.control import remove_run, replaceable
from lorad.daemon.api.views import history, listed_view, of_row, run_view, show_view, with_place
from lorad.daemon.context import Context
from lorad.daemon.process.user_files import own_directory
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import create, make_directory, read_spec, refuse_used
from lorad.daemon.runs.reference import clear, settle, staged
from lorad.daemon.storage.footprint import footprint, short_of_disk
from lorad.errors import SpecError
from lorad.records.measured import Evaluation, Step
from lorad.records.requests import RunRequest, SelectRequest
from lorad.records.runs import Run, RunDetails
from lorad.spec.errors import leaves
from lorad.spec.model import Spec
from lorad.store import metrics, runs
from lorad.store.select import COLUMNS, is_of_spec, measured, select

_MOST_NAMES = 100  # that one request may ask for
_MOST_STEPS = 10000
_AT_ONCE = 1000  # runs; 635 are read in 2.3 ms; beside a thread that works, each row waits for its turn


async def run(ctx: Context, call: Call) -> Run:
    """Check a spec, preflight it, and queue it as a run.

    Raises SpecError, Conflict (the name is in use, or the run to replace is not over), StorageError, and what
    `staged` raises; then nothing was made, and nothing removed.
    """
    body = call.json(RunRequest)
    spec = await read_spec(ctx, call.caller, body)
    before = replaceable(ctx, call.caller, str(spec.name)) if body.replace else None
    if before is None:
        refuse_used(ctx, spec)
    refuse_priority(ctx, call.caller, spec)
    reference = await staged(ctx, call.caller, spec, body.cwd)
    try:
        spec, request = await prepare_request(ctx, call.caller.uid, spec, body, reference)
        if before is not None:
            await remove_run(ctx, before.name, call.caller.name)
        refuse_used(ctx, spec)
        directory = make_directory(ctx, spec, body.spec, request)
        warnings = [*request.facts.warnings]
        has_end = spec.algorithm.kind != "tinker"
        if has_end:
            warnings += short_of_disk(footprint(spec, request.facts, directory))
        settle(reference, directory)
        row = create(ctx, spec, directory, call.caller, warnings)
        if not has_end and (user := ctx.user(call.caller.uid)) is not None:
            own_directory(row.dir.tinker, user)  # its door writes requests at once
    finally:
        clear(reference)
    ctx.loop.poke()
    return run_view(ctx, row)


async def list_runs(ctx: Context, call: Call) -> list[Run]:
    """List runs, newest first: the named ones, or the active ones and the last day's, or all.

    limit: how many ended runs at most; 0 for no limit.
    """
    everything = call.number("all", 0) != 0
    limit = call.number("limit", 0)
    if (names := call.text("names")) is not None:
        rows = await ctx.read(runs.list_named, names.split(",")[:_MOST_NAMES])
    elif runs.count_listed(ctx.store, all=everything) <= _AT_ONCE:
        rows = runs.list_runs(ctx.store, all=everything, limit=limit)
    else:
        rows = await ctx.read(runs.list_runs, all=everything, limit=limit)
    return [with_place(ctx, listed_view(ctx, row)) for row in seen(ctx, call.caller, rows)]


async def select_runs(ctx: Context, call: Call) -> list[Run]:
    """List the runs that a selection means and the caller may see, sorted, with figures that it asks for.

    Raises SpecError for a state, a column or a key of the spec that does not exist.
    """
    body = call.json(SelectRequest)
    keys = leaves(Spec)
    words = [*body.keys, *(word.removeprefix("-") for word in body.sort)]
    for word in words:
        related = [key for key in keys if f"{key}.".startswith(f"{word}.") or word.startswith(f"{key}.")]
        if "." in word and not related:
            near = get_close_matches(word, keys, 1)
            hint = f"Did you mean {near[0]}?" if near else "docs/spec.md lists all keys."
            raise SpecError(f"a spec has no key {word}", hint=hint)
    measures = [word for word in words if word not in COLUMNS and not is_of_spec(word)]
    owner_uid = None if sees_all(ctx, call.caller) else call.caller.uid
    selected = await ctx.read(
        select,
        body.selection.checked(call.caller.name),
        owner_uid=owner_uid,
        recent=body.recent,
        keys=[*dict.fromkeys([*body.keys, *measures])],
        sort=body.sort,
        limit=body.limit,
    )
    lacking = [word for word in measures if all(row.values[word] is None for row in selected)]
    if lacking and any(row.run.step for row in selected):
        # in a thread, as there may be thousands of names to compare
        await asyncio.to_thread(_refuse_unmeasured, lacking, await ctx.read(measured, owner_uid))
    views = []
    for row in selected:
        view = with_place(ctx, listed_view(ctx, row.run))
        if body.keys:
            view = msgspec.structs.replace(view, values={key: row.values[key] for key in body.keys})
        views.append(view)
    return views


def _refuse_unmeasured(words: Sequence[str], metrics: Sequence[str]) -> None:
    """Raise SpecError for the first word that is none of the metrics."""
    for word in words:
        if word not in metrics:
            keys = [key for key in leaves(Spec) if key.rpartition(".")[2] == word]
            near = keys or get_close_matches(word, {*COLUMNS, *LISTED, *metrics})
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Columns are {', '.join(COLUMNS)}."
            raise SpecError(f"{word} is no column, and no run has measured it lately", hint=hint)


async def show_run(ctx: Context, call: Call) -> RunDetails:
    """Describe one run in full."""
    run = runs.get(ctx.store, call.run)
    return show_view(ctx, run, await ctx.read(history, run))


async def list_steps(ctx: Context, call: Call) -> list[Step]:
    """List the steps of the surviving lineage."""
    after = call.number("after", 0)
    every = call.number("every", 1)
    limit = min(max(call.number("limit", _MOST_STEPS), 0), _MOST_STEPS)
    if every > 1:
        return await ctx.read(metrics.sparse_steps, call.run, every, after, limit)
    return await ctx.read(metrics.steps, call.run, after, limit)


async def list_evals(ctx: Context, call: Call) -> list[Evaluation]:
    """List the evaluations of the surviving lineage."""
    views = []
    for row in await ctx.read(metrics.evals, call.run):
        likelihood = None if row.nll is None else perplexity(row.nll)
        views.append(of_row(Evaluation, row, perplexity=likelihood))
    return views
