"""Evaluations of the surviving lineage."""

from __future__ import annotations

from lorad.client.shapes import Evaluation
from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.daemon.views import of_row
from lorad.store import metrics, runs


async def handle(ctx: Context, call: Call) -> list[Evaluation]:
    runs.get(ctx.store, call.run)
    return [of_row(Evaluation, row) for row in await ctx.read(metrics.evals, call.run)]
