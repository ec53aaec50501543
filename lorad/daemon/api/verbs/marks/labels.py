"""Names, tags and notes of runs."""

from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.runs.rename import rename as rename_run
from lorad.errors import SpecError
from lorad.records.requests import LabelRequest, RenameRequest
from lorad.records.runs import Run
from lorad.spec.model import TAGS
from lorad.store import events, runs


async def label(ctx: Context, call: Call) -> Run:
    """Add tags to a run, take some off it, and write its note. Raises SpecError for too many tags."""
    body = call.json(LabelRequest)
    run = runs.get(ctx.store, call.run)
    tags = [tag for tag in dict.fromkeys([*run.tags, *body.add]) if tag not in body.remove]
    if len(tags) > TAGS:
        hint = f"Take some off: `lorad tag {run.name} -TAG`."
        raise SpecError(f"{len(tags)} tags are more than {TAGS}", hint=hint)
    note = run.note if body.note is None else body.note.strip()
    if (tags, note) != (run.tags, run.note):
        with ctx.store.write():
            runs.set_labels(ctx.store, run.name, tags, note)
            data = {"tags": tags, "note": note, "by": call.caller.name}
            events.append(ctx.store, run.name, "labels", data)
    return run_view(ctx, runs.get(ctx.store, call.run))


async def rename(ctx: Context, call: Call) -> Run:
    """Give a run that does not work another name; see `lorad/daemon/runs/rename.py` for what that refuses."""
    run = rename_run(ctx, call.run, call.json(RenameRequest).name, call.caller.name)
    ctx.loop.poke()
    return run_view(ctx, run)
