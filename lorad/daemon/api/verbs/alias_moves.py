"""List who moved an alias, when, and to what."""

from __future__ import annotations

from lorad.client.shapes import Move
from lorad.daemon.access import seen_by_run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.store.aliases import get, moves


async def handle(ctx: Context, call: Call) -> list[Move]:
    """List the moves of an alias, also of a removed one, newest first.

    Raises NotFound if it never existed.
    """
    alias = call.request.match_info["alias"]
    found = await ctx.read(moves, alias)
    if not found:
        get(ctx.store, alias)
    return [of_row(Move, row) for row in seen_by_run(ctx, call.caller, found)]
