"""The daemon exits.

Runs, gateway and pools continue unless they are to end as well; the next daemon adopts them.
"""

from __future__ import annotations

import os

from msgspec import Struct

from lorad.client.box_shapes import Shutdown, StayingPool
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import end_pools, timeout_of
from lorad.daemon.queue.tenants import tenants_of
from lorad.daemon.serving.gateways import gateway_socket, stop_gateway


class Body(Struct):
    """The body of a request to shut down.

    pools: end the pools that have no active run, too.
    """

    gateway: bool = False
    pools: bool = False


async def handle(ctx: Context, call: Call) -> Shutdown:
    body = call.json(Body)
    async with ctx.requests.parting:
        ctx.close()  # from here on nothing starts another pool
        serves = gateway_socket(ctx) is not None and not body.gateway
        stopped = body.gateway and stop_gateway(ctx)
        up = [pool for pool in ctx.pools.values() if pool.process.is_up]
        if body.pools:
            await end_pools(ctx, [pool for pool in up if not tenants_of(ctx, pool)])
        staying = [stay(ctx, pool, serves=serves) for pool in up if pool.process.is_up]
        ended = [pool.id for pool in up if not pool.process.is_up]
        return Shutdown(os.getpid(), stopped, ended, staying)


def stay(ctx: Context, pool: Pool, *, serves: bool) -> StayingPool:
    """Describe why a pool stays up without a daemon, and for how many more seconds it may be idle."""
    runs = [run.name for run in tenants_of(ctx, pool)]
    kept = pool.status.kept if pool.status and serves else []
    idle = 0.0 if runs else pool.idle_seconds
    return StayingPool(pool.id, runs, kept, max(0.0, timeout_of(ctx, pool) - idle))
