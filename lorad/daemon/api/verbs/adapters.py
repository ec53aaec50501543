"""Versions of one run or of all."""

from __future__ import annotations

import asyncio

from lorad.client.shapes import Version
from lorad.daemon.access import seen_by_run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import version_view
from lorad.daemon.context import Context
from lorad.daemon.pools.life import refresh
from lorad.store import runs
from lorad.store.rows import VersionRow
from lorad.store.versions import versions


async def handle(ctx: Context, call: Call) -> list[Version]:
    run = call.text("run")
    if run is not None:
        runs.get(ctx.store, run)
    await refresh(ctx)
    rows = seen_by_run(ctx, call.caller, await ctx.read(versions, run))
    return await asyncio.to_thread(views, ctx, rows)


def views(ctx: Context, rows: list[VersionRow]) -> list[Version]:
    """Looks for the files of each, which takes a while where there are thousands."""
    return [version_view(ctx, row) for row in rows]
