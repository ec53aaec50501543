"""The devices of this machine and who holds them."""

from __future__ import annotations

import asyncio
from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.devices import memory_used
from lorad.daemon.request import Call


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    holders = {name: pool.id for pool in ctx.pools.values() if pool.process.is_up for name in pool.setup.names}
    return [
        {
            "device": device.name,
            "name": device.label,
            "memory_total": device.memory_total,
            "memory_used": await asyncio.to_thread(memory_used, device),
            "pool": holders.get(device.name),
        }
        for device in ctx.devices
    ]
