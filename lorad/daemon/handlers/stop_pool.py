"""End an idle pool."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.pools import look_at_process, stop_pool
from lorad.daemon.request import Call
from lorad.daemon.tenants import tenants_of, told
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
    if tenants := tenants_of(ctx, pool):
        commands = "; ".join(f"lorad pause {run['name']}" for run in tenants)
        raise Conflict(f"pool {name} is busy with {told(tenants)}", hint=f"`{commands}` first.")
    if pool.serves:
        names = ", ".join(sorted(pool.serves))
        raise Conflict(
            f"pool {name} is kept up to serve {names}", hint=f"`lorad serve --stop {min(pool.serves)}` first."
        )
    if pool.guests:
        raise Conflict(f"pool {name} answers a request", hint="Try again in a moment.")
    stop_pool(ctx, pool)
    ctx.waker.poke()
    return pool_view(ctx, pool)
