"""Evaluations of the surviving lineage."""

from __future__ import annotations

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store import metrics, runs
from lorad.store.rows import EvalRow


async def handle(ctx: Context, call: Call) -> list[EvalRow]:
    runs.get(ctx.store, call.run)
    return await ctx.read(metrics.evals, call.run)
