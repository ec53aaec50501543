"""`hello`, `status` and `shutdown`: calls about the pool itself."""

from __future__ import annotations

import psutil

from lorad.pool.state import Pool
from lorad.protocol.calls import Call, EngineStatus, Nothing, PoolInfo, PoolStatus, Tenant


async def hello(pool: Pool, _call: Call, _args: Nothing) -> PoolInfo:
    return pool.info


async def status(pool: Pool, _call: Call, _args: Nothing) -> PoolStatus:
    health = await pool.engine.health()
    return PoolStatus(
        info=pool.info,
        tenants=[
            Tenant(tenant.run, tenant.attempt, pool.fence(tenant.run).busy, tenant.slot.parameters)
            for tenant in pool.tenants.values()
        ],
        loaded=pool.loaded.names(),
        engine_tokens_per_second=health.tokens_per_second,
        trainer_tokens_per_second=pool.meter.trained_per_second,
        rss_bytes=psutil.Process().memory_info().rss,
        idle_seconds=pool.meter.idle_seconds,
        engine=EngineStatus(
            alive=health.alive,
            asleep=health.asleep,
            running=health.running,
            waiting=health.waiting,
            slots_used=health.slots_used,
            slots=health.slots,
            prefix_hits=health.prefix_hits,
            cache_used=health.cache_used,
            detail=health.detail,
        ),
        trainer=await pool.work.status(here=not pool.phases.is_base_away),
    )


async def shutdown(pool: Pool, _call: Call, _args: Nothing) -> Nothing:
    """What is under way ends first."""
    pool.stopping.set()
    return Nothing()
