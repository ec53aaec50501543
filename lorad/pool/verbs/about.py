"""`hello`, `status`, `write_uses` and `shutdown`: calls about the pool itself."""

import asyncio

import psutil

from lorad.pool.state import Pool
from lorad.protocol.calls import Call, Nothing
from lorad.protocol.status import Capacity, EngineStatus, PoolInfo, PoolStatus, Tenant


async def hello(pool: Pool, _call: Call, _args: Nothing) -> PoolInfo:
    return pool.info


async def status(pool: Pool, _call: Call, _args: Nothing) -> PoolStatus:
    health = await pool.engine.health()
    return PoolStatus(
        info=pool.info,
        tenants=[
            Tenant(
                tenant.run,
                tenant.attempt,
                pool.fence(tenant.run).busy,
                tenant.slot.parameters,
                tenant.slot.bytes,
                pool.parties.of(tenant.run).waited,
            )
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
            adapters_per_step=health.adapters_per_step,
        ),
        trainer=await pool.work.status(here=not pool.phases.is_base_away),
        kept=pool.loaded.kept(),
        capacity=await _capacity(pool),
    )


async def write_uses(pool: Pool, _call: Call, _args: Nothing) -> Nothing:
    """Return when the file of uses has everything up to now."""
    if pool.uses is not None:
        await asyncio.to_thread(pool.uses.write, all=True)
    return Nothing()


async def shutdown(pool: Pool, _call: Call, _args: Nothing) -> Nothing:
    """Begin to stop the pool; calls under way end first."""
    pool.stopping.set()
    return Nothing()


async def _capacity(pool: Pool) -> Capacity:
    """Bytes of versions are those that the pool's own memory holds.

    Answers at once: servers are not asked.
    """
    limits = pool.engine.capabilities()
    slots = sum(tenant.slot.bytes for tenant in pool.tenants.values())
    held = await pool.engine.loaded() if pool.info.engine == "builtin" else []
    return Capacity(
        max_versions=limits.max_versions,
        versions=max(len(held), len(pool.loaded.names())),
        max_rank=limits.max_rank,
        memory=pool.memory,
        memory_used=slots + sum(version.bytes for version in held),
    )
