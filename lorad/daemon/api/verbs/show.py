"""Everything about one run."""

from __future__ import annotations

from lorad.client.shapes import RunDetails
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import history, show_view
from lorad.daemon.context import Context
from lorad.store import runs


async def handle(ctx: Context, call: Call) -> RunDetails:
    run = runs.get(ctx.store, call.run)
    return show_view(ctx, run, await ctx.read(history, run))
