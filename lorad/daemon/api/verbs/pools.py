"""List the pools that are up."""

from __future__ import annotations

from lorad.client.box_shapes import Pool
from lorad.daemon.access import sees
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import pool_view
from lorad.daemon.context import Context
from lorad.daemon.pools.life import refresh


async def handle(ctx: Context, call: Call) -> list[Pool]:
    await refresh(ctx)
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    return [pool_view(ctx, pool) for pool in up if sees(ctx, call.caller, pool.setup.owner)]
