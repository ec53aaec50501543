"""The devices of this machine, who holds them and why, and who else is there."""

from __future__ import annotations

import asyncio

import psutil

from lorad.client.box_shapes import Device, DeviceProcess, Lease
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.gpu import devices
from lorad.daemon.gpu.lock_notes import Holder
from lorad.daemon.gpu.occupancy import Sight
from lorad.daemon.pools.watch_gpus import fresh
from lorad.daemon.queue.device_holders import lease_of

CPU_SECONDS = 0.05  # over which the use of the CPU is measured


async def handle(ctx: Context, call: Call) -> list[Device]:
    await fresh(ctx)
    cpu = await asyncio.to_thread(look_at_cpu) if ctx.gpus.devices[0].is_cpu else None
    return [
        device_view(ctx, device, cpu or ctx.gpus.sights.seen.get(device.uuid)) for device in ctx.gpus.devices
    ]


def look_at_cpu() -> Sight:
    """Measure the memory and the load of the whole machine. Runs in a thread, for CPU_SECONDS."""
    memory = psutil.virtual_memory()
    return Sight(0.0, memory.total - memory.available, psutil.cpu_percent(CPU_SECONDS) / 100)


def device_view(ctx: Context, device: devices.Device, sight: Sight | None) -> Device:
    here = [pool.id for pool in ctx.pools.values() if pool.process.is_up and device.name in pool.setup.names]
    lease = lease_of(ctx, device)
    return Device(
        device=device.name,
        name=device.label,
        memory_total=device.memory_total,
        memory_used=sight.memory_used if sight else 0,
        utilization=sight.utilization if sight else None,
        pool=here[0] if here else None,
        lease=lease_view(lease) if lease else None,
        processes=[
            DeviceProcess(one.pid, one.user, one.name, one.memory, one.ours)
            for one in (sight.processes if sight else ())
        ],
    )


def lease_view(lease: Holder) -> Lease:
    return Lease(lease.pool, lease.uid, lease.user, lease.why, lease.since, lease.idle_timeout)
