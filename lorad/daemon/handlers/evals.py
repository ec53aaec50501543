"""Evaluations of the surviving lineage."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store import metrics, runs


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    runs.get(ctx.store, call.run)
    return await ctx.read(metrics.evals, call.run)
