"""Runs, newest first."""

from __future__ import annotations

from lorad.client.shapes import Run
from lorad.daemon.access import seen
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.store import runs

MOST_NAMES = 100


async def handle(ctx: Context, call: Call) -> list[Run]:
    """names: of those alone. limit: at most so many of those that ended; 0: all."""
    if (names := call.text("names")) is not None:
        rows = await ctx.read(runs.list_named, names.split(",")[:MOST_NAMES])
        return [run_view(row) for row in seen(ctx, call.caller, rows)]
    everything, limit = call.number("all", 0) != 0, call.number("limit", 0)
    rows = await ctx.read(runs.list_runs, all=everything, limit=limit)
    return [run_view(row) for row in seen(ctx, call.caller, rows)]
