"""Watch who computes on GPUs beside this daemon's pools."""

import asyncio
import logging
import os
import time

import psutil

from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.occupancy import FRESH_SECONDS, STALE_SECONDS, Ours, Sight, read_all
from lorad.daemon.process.processes import read_status
from lorad.records.devices import DeviceSample

log = logging.getLogger("lorad.daemon")


def look(ctx: Context) -> None:
    """Begin to look at the GPUs, unless that was done just now or is under way."""
    gpus = [device for device in ctx.gpus.devices if device.uuid]
    sights = ctx.gpus.sights
    oldest = min((sights.seen[d.uuid].at if d.uuid in sights.seen else 0.0 for d in gpus), default=None)
    if oldest is None or sights.since is not None or time.monotonic() - oldest < FRESH_SECONDS:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        sights.seen = read_all(gpus, _own_marks(ctx))
        return
    sights.since = time.monotonic()
    sights.done.clear()
    ctx.spawn(_observe(ctx, gpus))


async def _observe(ctx: Context, gpus: list[Device]) -> None:
    sights = ctx.gpus.sights
    try:
        sights.seen = await asyncio.to_thread(read_all, gpus, _own_marks(ctx))
    except Exception as error:  # the bindings may not fit the driver
        log.exception("NVML")
        sights.seen = {device.uuid: Sight(time.monotonic(), lost=repr(error)) for device in gpus}
    finally:
        sights.since = None
        sights.done.set()
        ctx.loop.poke()


def keep_history(ctx: Context) -> None:
    """Take a sample of each device now and then."""
    history = ctx.gpus.history
    if not history.is_due():
        return
    look(ctx)
    now = time.time()
    samples = {}
    for device in ctx.gpus.devices:
        sight = sight_of_cpu(None) if device.is_cpu else ctx.gpus.sights.seen.get(device.uuid)
        if sight is None or sight.lost:
            continue
        figures = sight.memory_used, sight.utilization, sight.power, sight.temperature
        samples[device.name] = DeviceSample(now, *figures)
    history.take(samples)


def sight_of_cpu(seconds: float | None) -> Sight:
    """Measure memory and load of the machine over some seconds; None: since the last time, at once."""
    memory = psutil.virtual_memory()
    return Sight(0.0, memory.total - memory.available, psutil.cpu_percent(seconds) / 100)


def occupied(ctx: Context) -> dict[str, tuple[str, bool]]:
    """Look at the GPUs, and say by name why nothing can be placed on some, though they may not be locked.

    The flag says that the next look may clear it.
    """
    look(ctx)
    reasons: dict[str, tuple[str, bool]] = {}
    since = ctx.gpus.sights.since
    for device in (device for device in ctx.gpus.devices if device.uuid):
        sight = ctx.gpus.sights.seen.get(device.uuid)
        if sight is not None and time.monotonic() - sight.at <= STALE_SECONDS:
            reasons[device.name] = sight.strangers(device), False
        elif since is not None and time.monotonic() - since > STALE_SECONDS:
            why = f"{device.name}: NVIDIA's driver does not answer, so who uses it is not known"
            reasons[device.name] = why, False
        else:
            reasons[device.name] = f"checking who uses {device.name}", True
    return {name: reason for name, reason in reasons.items() if reason[0]}


def _own_marks(ctx: Context) -> Ours:
    """Describe what shows that a process is one of this daemon's."""
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    statuses = [read_status(pool.attempt()) or {} for pool in up]
    pids = [status[key] for status in statuses for key in ("pid", "shim_pid") if status.get(key)]
    mark = b"LORAD_ATTEMPT=" + os.fsencode(ctx.home.pools) + b"/"
    return Ours(tuple(pids), mark, frozenset(name for pool in up for name in pool.names))
