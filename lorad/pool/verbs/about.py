"""Calls about the pool itself: `hello`, `status`, `write_uses` and `shutdown`."""

import asyncio

import psutil

from lorad.pool.state import Pool
from lorad.protocol.calls import Call, Nothing
from lorad.protocol.status import Capacity, PoolInfo, PoolStatus, TenantStatus, TrainerStatus


async def hello(pool: Pool, _call: Call, _args: Nothing) -> PoolInfo:
    return pool.info


async def status(pool: Pool, _call: Call, _args: Nothing) -> PoolStatus:
    """Say how the pool is, at once: servers are not asked what they hold."""
    health = await pool.engine.health()
    trainer = await pool.work.health()
    limits = pool.engine.capabilities()
    versions = await pool.engine.loaded() if pool.info.engine == "builtin" else []  # in the pool's own memory
    slot_bytes = sum(tenant.slot.bytes for tenant in pool.tenants.values())
    return PoolStatus(
        info=pool.info,
        tenants=[
            TenantStatus(
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
        engine=health,
        trainer=TrainerStatus(
            alive=trainer.alive,
            detail=trainer.detail,
            here=not pool.phases.is_base_away,
            memory=trainer.memory,
            memory_peak=trainer.memory_peak,
        ),
        kept=pool.loaded.kept(),
        capacity=Capacity(
            max_versions=limits.max_versions,
            versions=max(len(versions), len(pool.loaded.names())),
            max_rank=limits.max_rank,
            memory=pool.memory,
            memory_used=slot_bytes + sum(version.bytes for version in versions),
        ),
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
