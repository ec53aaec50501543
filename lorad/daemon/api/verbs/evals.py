"""List the evaluations of the surviving lineage."""

from __future__ import annotations

from lorad.client.shapes import Evaluation
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.store import metrics, runs


async def handle(ctx: Context, call: Call) -> list[Evaluation]:
    runs.get(ctx.store, call.run)
    return [of_row(Evaluation, row) for row in await ctx.read(metrics.evals, call.run)]
