"""Another name for a run."""

from lorad.client.mark_shapes import RenameRequest
from lorad.client.shapes import Run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.runs.rename import rename as renamed


async def rename(ctx: Context, call: Call) -> Run:
    """Give a run that does not work another name; see `lorad/daemon/runs/rename.py` for what that refuses."""
    run = renamed(ctx, call.run, call.json(RenameRequest).name, call.caller.name)
    ctx.loop.poke()
    return run_view(ctx, run)
