"""What keeps a run from devices: runs before it in the queue, limits of its user, pools, and other people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorad.daemon.context import Context, spec_of
from lorad.daemon.gpu.devices import Device, is_taken
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import look_at_process
from lorad.daemon.pools.watch_gpus import in_the_way
from lorad.daemon.queue.capacity import Need, lacking
from lorad.daemon.queue.device_holders import held_in_words
from lorad.daemon.queue.limits import over_devices, user_of
from lorad.daemon.queue.tenants import need_of_run, room_in, tenants_of, told
from lorad.protocol.pool_setup import PoolSetup
from lorad.states import RunState
from lorad.store.rows import RunRow

Devices = tuple[Device, ...]
SHORT_SECONDS = 0.5


@dataclass(frozen=True)
class Claim:
    """A run that waits for devices.

    alone: it needs all other runs to be gone; else it only needs more room.
    """

    run: str
    priority: int
    devices: Devices
    alone: bool

    def holds_up(self, run: RunRow, devices: Devices) -> bool:
        """Check whether `run`, which comes after it, may not have the devices before it."""
        return bool({*devices} & {*self.devices}) and (self.alone or self.priority > run.priority)


@dataclass(frozen=True)
class Obstacle:
    """Why devices cannot be had now.

    idle: pools that need only be stopped.
    claim: `Claim.alone`; None for no claim.
    soon: it goes away without any further action.
    taken: devices that are held by others than this daemon's pools.
    barred: the queue or a limit bars them, not who holds them.
    parts: parts of the reason, which other obstacles may share.
    """

    reason: str
    idle: Sequence[Pool] = ()
    claim: bool | None = True
    soon: bool = False
    taken: Devices = ()
    parts: Sequence[str] = ()
    barred: bool = False


def passed(devices: Devices, run: RunRow | None, claims: Sequence[Claim]) -> Obstacle | None:
    """Find the run before this one that must not be passed."""
    first = next((claim for claim in claims if run is not None and claim.holds_up(run, devices)), None)
    if first is None:
        return None
    names = ", ".join(device.name for device in devices)
    when = "the others end" if first.alone else "it fits"
    return Obstacle(f"run {first.run} is next on {names}, when {when}", claim=None, barred=True)


def limited(ctx: Context, setup: PoolSetup, devices: Devices, run: RunRow | None) -> Obstacle | None:
    """Find the limit of devices of the pool's owner, whose idle pools give way."""
    reason, idle = over_devices(ctx, setup, devices, user_of(run, setup))
    return Obstacle(reason, idle=idle, claim=None, barred=True) if reason else None


def obstacle(ctx: Context, setup: PoolSetup, devices: Devices, run: RunRow | None = None) -> Obstacle | None:
    """Find what keeps a pool of `setup`, with `run` in it, from having the devices now."""
    holders = pools_on(ctx, devices)
    for pool in holders:
        where = f"pool {pool.id} on {', '.join(pool.setup.names)}"
        if pool.stop_asked is not None:
            return Obstacle(f"{where} is stopping", soon=True)
        if pool.setup.key == setup.key:
            return None if run is None else crowding(ctx, pool, run, need_of_run(run, setup.dtype))
        if tenants := tenants_of(ctx, pool):
            return busy(pool, tenants, run)
        if pool.serves:
            names = ", ".join(sorted(pool.serves))
            return Obstacle(f"{where} serves {names}; `lorad serve --stop` lets it end", claim=None)
        if pool.guests:
            return Obstacle(f"{where} answers a request", soon=True)
    if in_use := by_others(ctx, devices, holders):
        return in_use
    if holders:
        names = ", ".join(f"pool {pool.id} on {', '.join(pool.setup.names)}" for pool in holders)
        return Obstacle(f"waiting for idle {names} to end", idle=holders, soon=True)
    return None


def busy(pool: Pool, tenants: list[RunRow], run: RunRow | None) -> Obstacle:
    """Describe a pool of another kind with runs in it. Runs that leave anyway need not be asked."""
    leaving = all(tenant.state == RunState.STOPPING for tenant in tenants)
    if run is not None and any(tenant.preempted == run.name for tenant in tenants):
        return Obstacle(
            f"{told(tenants)} {stops(tenants)} to make room on {', '.join(pool.setup.names)}", soon=leaving
        )
    end = "it ends" if len(tenants) == 1 else "they end"
    return Obstacle(f"pool {pool.id} is busy with {told(tenants)}; starts when {end}", soon=leaving)


def stops(tenants: Sequence[RunRow]) -> str:
    return "stops at its next step" if len(tenants) == 1 else "stop at their next steps"


def by_others(ctx: Context, devices: Devices, holders: Sequence[Pool]) -> Obstacle | None:
    """Find devices that other daemons hold, or that processes outside of any pool use."""
    ours = {name for pool in holders for name in pool.setup.names}
    taken = tuple(device for device in devices if device.name not in ours and is_taken(device))
    if taken:
        words = [held_in_words(ctx, device) for device in taken]
        return Obstacle("; ".join(words), claim=None, taken=taken, parts=words)
    found = [there for device in devices if (there := in_the_way(ctx, device))[0]]
    if not found:
        return None
    reasons, is_known = [reason for reason, _ in found], not any(soon for _, soon in found)
    return Obstacle("; ".join(reasons), claim=None if is_known else True, soon=not is_known, parts=reasons)


def crowding(ctx: Context, pool: Pool, run: RunRow, need: Need) -> Obstacle | None:
    """Find what keeps a run out of a pool of the right kind, because of the runs in it."""
    tenants = tenants_of(ctx, pool)
    found = crowded(ctx, pool, tenants, run, need)
    going = [tenant for tenant in tenants if tenant.preempted == run.name]
    if found is None or not going:
        return found
    return replace(found, reason=f"{told(going)} {stops(going)} to make room in pool {pool.id}", soon=True)


def crowded(ctx: Context, pool: Pool, tenants: list[RunRow], run: RunRow, need: Need) -> Obstacle | None:
    leaving = any(tenant.state == RunState.STOPPING for tenant in tenants)
    alone_there = next((tenant for tenant in tenants if spec_of(tenant).resources.exclusive), None)
    if alone_there is not None:
        reason = f"{told([alone_there])} has pool {pool.id} for itself; starts when it ends"
        return Obstacle(reason, soon=leaving)
    there = "is" if len(tenants) == 1 else "are"
    if tenants and spec_of(run).resources.exclusive:
        reason = (
            f"it is to have pool {pool.id} for itself (resources.exclusive); {told(tenants)} {there} in it"
        )
        return Obstacle(reason, soon=all(tenant.state == RunState.STOPPING for tenant in tenants))
    lack = lacking(room_in(ctx, pool), need)
    count = f"{len(tenants)} run{'' if len(tenants) == 1 else 's'} {there} in it"
    return Obstacle(f"pool {pool.id} {lack.says}; {count}", claim=False, soon=leaving) if lack else None


def pools_on(ctx: Context, devices: Devices) -> list[Pool]:
    """The pools whose process holds one of the devices; a CPU with other slots than before is theirs as a
    whole.
    """
    names, known = {device.name for device in devices}, {device.name for device in ctx.gpus.devices}
    here = []
    for pool in ctx.pools.values():
        is_stray = pool.setup.device == "cpu" and devices[0].is_cpu and not known & set(pool.setup.names)
        if names & set(pool.setup.names) or is_stray:
            look_at_process(ctx, pool)
            here.append(pool)
    return [pool for pool in here if pool.process.is_up or tenants_of(ctx, pool)]


def count_free(ctx: Context) -> int:
    """Count the devices that nothing holds: no pool, no other daemon, no other process.

    All of a long queue asks.
    """
    at, count = ctx.gpus.notes.free
    if time.monotonic() - at > SHORT_SECONDS:
        count = sum(is_free(ctx, device) for device in ctx.gpus.devices)
        ctx.gpus.notes.free = time.monotonic(), count
    return count


def is_free(ctx: Context, device: Device) -> bool:
    return not pools_on(ctx, (device,)) and not is_taken(device) and not in_the_way(ctx, device)[0]
