"""Another name for a run."""

from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.runs.rename import rename as renamed
from lorad.records.requests import RenameRequest
from lorad.records.runs import Run


async def rename(ctx: Context, call: Call) -> Run:
    """Give a run that does not work another name; see `lorad/daemon/runs/rename.py` for what that refuses."""
    run = renamed(ctx, call.run, call.json(RenameRequest).name, call.caller.name)
    ctx.loop.poke()
    return run_view(ctx, run)
