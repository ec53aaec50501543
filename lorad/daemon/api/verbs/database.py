"""Check whether the database is whole and whether the files that it names are on disk."""

from __future__ import annotations

import asyncio

from lorad.client.box_shapes import Census
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.record.rows_and_disk import of_home


async def handle(ctx: Context, call: Call) -> Census:
    """Reads all of it, on a connection of its own."""
    return await asyncio.to_thread(of_home, ctx.home, ctx.runs_root)
