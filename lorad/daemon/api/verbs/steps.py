"""List the steps of the surviving lineage."""

from __future__ import annotations

from lorad.client.shapes import Step
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.store import metrics, runs


async def handle(ctx: Context, call: Call) -> list[Step]:
    runs.get(ctx.store, call.run)
    after, limit, every = call.number("after", 0), call.number("limit", 10000), call.number("every", 1)
    if every > 1:
        found = await ctx.read(metrics.sparse_steps, call.run, every, after, limit)
    else:
        found = await ctx.read(metrics.steps, call.run, after, limit)
    return [of_row(Step, row) for row in found]
