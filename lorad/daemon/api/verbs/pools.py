"""List the pools that are up, and stop one."""

from lorad.client.box_shapes import Pool
from lorad.daemon.access import sees
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import pool_view
from lorad.daemon.context import Context
from lorad.daemon.pools import life
from lorad.daemon.queue.tenants import tenants_of, told
from lorad.errors import Conflict, NotFound


async def list_pools(ctx: Context, call: Call) -> list[Pool]:
    """List the pools that are up."""
    await life.refresh(ctx)
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    return [pool_view(ctx, pool) for pool in up if sees(ctx, call.caller, pool.setup.owner)]


async def stop_pool(ctx: Context, call: Call) -> Pool:
    """End a pool that nobody uses. With `force`, the runs in it end with reason `lost` and can be resumed.

    Raises NotFound when it is not up, Conflict while a run or a request uses it or while it is kept up to
    serve.
    """
    name, force = call.request.match_info["pool"], bool(call.number("force", 0))
    pool = ctx.pools.get(name)
    if pool is not None:
        life.look_at_process(ctx, pool)
    if pool is None or not pool.process.is_up:
        raise NotFound(f"no pool {name} is up", hint="`lorad pools` shows what there is.")
    if (tenants := tenants_of(ctx, pool)) and not force:
        commands = "; ".join(f"lorad pause {run.name}" for run in tenants)
        hint = (
            f"`{commands}` first. `lorad pools stop {name} --force` ends them at once; `lorad resume` "
            "takes them up."
        )
        raise Conflict(f"pool {name} is busy with {told(tenants)}", hint=hint)
    if pool.serves:
        names = ", ".join(sorted(pool.serves))
        raise Conflict(
            f"pool {name} is kept up to serve {names}", hint=f"`lorad serve --stop {min(pool.serves)}` first."
        )
    if pool.guests and not force:
        raise Conflict(f"pool {name} answers a request", hint="Try again in a moment, or with --force.")
    life.stop_pool(ctx, pool)
    ctx.loop.poke()
    return pool_view(ctx, pool)
