"""End an idle pool."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.place import tenant_of
from lorad.daemon.pools import look_at_process, stop_pool
from lorad.daemon.request import Call
from lorad.daemon.views import pool_view
from lorad.errors import Conflict, NotFound


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Raises NotFound when it is not up, Conflict while a run or a request uses it."""
    name = call.request.match_info["pool"]
    pool = ctx.pools.get(name)
    if pool is not None:
        look_at_process(ctx, pool)
    if pool is None or not pool.process.is_up:
        raise NotFound(f"no pool {name} is up", hint="`lorad pools` shows what there is.")
    if tenant := tenant_of(ctx, pool):
        raise Conflict(f"pool {name} is busy with run {tenant}", hint=f"`lorad pause {tenant}` first.")
    if pool.guests:
        raise Conflict(f"pool {name} answers a request", hint="Try again in a moment.")
    stop_pool(ctx, pool)
    ctx.waker.poke()
    return pool_view(ctx, pool)
