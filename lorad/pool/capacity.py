"""How much room a pool has for more runs: versions, ranks, and memory for slots and versions."""

from __future__ import annotations

from pathlib import Path

import psutil

from lorad.box.machine import NO_LIMIT, read_machine
from lorad.models.facts import read_facts
from lorad.pool.share import CPU_CACHE, beside_base
from lorad.pool.state import Pool
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import Capacity

# one in so many bytes that the base leaves, of a GPU and at least of a machine; the cache has half
ADAPTERS = 4


def memory_for_adapters(config: PoolSetup) -> int:
    """Return the bytes that slots and versions may take once both sides have started; 0: not known.

    On a CPU what the pool's share of the machine leaves beside the processes and the cache of an engine in
    the pool, which a small machine never fills. On a GPU it is known where one base serves both sides.
    """
    if config.device == "cpu":
        return _of_machine(config)
    if config.ranks is not None or config.server is not None:
        return 0
    return beside_base(config, read_facts(Path(config.model_path))) // ADAPTERS


def _of_machine(config: PoolSetup) -> int:
    granted = read_machine().memory
    if granted >= NO_LIMIT:
        return 0
    pool = psutil.Process()
    taken = sum(process.memory_info().rss for process in (pool, *pool.children(recursive=True)))
    cache = CPU_CACHE if config.server is None else 0
    left = int(granted * config.memory_fraction) - taken
    return max(1, left // ADAPTERS, left - cache)


async def capacity(pool: Pool) -> Capacity:
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
