"""Steps of the surviving lineage."""

from __future__ import annotations

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store import metrics, runs
from lorad.store.rows import StepRow


async def handle(ctx: Context, call: Call) -> list[StepRow]:
    runs.get(ctx.store, call.run)
    after, limit, every = call.number("after", 0), call.number("limit", 10000), call.number("every", 1)
    if every > 1:
        return await ctx.read(metrics.sparse_steps, call.run, every, after, limit)
    return await ctx.read(metrics.steps, call.run, after, limit)
