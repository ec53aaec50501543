"""What keeps a run from devices: runs before it in the queue, limits of its user, pools, and other people."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorad.daemon.access import Reader
from lorad.daemon.context import spec_of
from lorad.daemon.gpu.devices import Shape, shape_of
from lorad.daemon.pool import Pool
from lorad.daemon.queue.neighbours import waits_for, yields
from lorad.daemon.queue.setups import Devices
from lorad.daemon.queue.snapshot import Snapshot, asks_cluster
from lorad.daemon.queue.tenants import lack_of
from lorad.protocol.listener import user_name
from lorad.protocol.pool_setup import PoolSetup
from lorad.states import RunState
from lorad.store.rows import RunRow


@dataclass(frozen=True)
class Claim:
    """A run that waits for devices.

    alone: it needs all other runs to be gone; else it only needs more room.
    pool: on a cluster, the key of the pool in which it waits for that; others may have other nodes.
    """

    run: RunRow
    devices: Devices
    alone: bool
    pool: str = ""

    def holds_up(self, run: RunRow, setup: PoolSetup, devices: Devices) -> bool:
        """Check whether `run`, which comes after it, may not have the devices before it."""
        is_same = setup.key == self.pool if setup.nodes else bool({*devices} & {*self.devices})
        return is_same and (self.alone or self.run.priority > run.priority)


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


def obstacle(
    now: Snapshot, setup: PoolSetup, devices: Devices, run: RunRow | None, claims: Sequence[Claim]
) -> Obstacle | None:
    """Find what keeps a pool of `setup`, with `run` in it, from having the devices now.

    claims: the runs before it that wait.
    """
    return (
        _passed(now, setup, devices, run, claims)
        or _let_others_pass(now, setup, devices, run)
        or _set_aside(now, devices, run)
        or _beside_others(now, devices, run)
        or _limited(now, setup, devices, run)
        or _used_by_pools(now, setup, devices, run)
    )


def _passed(
    now: Snapshot, setup: PoolSetup, devices: Devices, run: RunRow | None, claims: Sequence[Claim]
) -> Obstacle | None:
    """Find the run before this one that must not be passed."""
    first = next((claim for claim in claims if run is not None and claim.holds_up(run, setup, devices)), None)
    if first is None:
        return None
    names = ", ".join(device.name for device in devices)
    when = "the others end" if first.alone else "it fits"
    who = now.reader_of(run, setup).name_all([first.run])
    return Obstacle(f"{who} is next on {names}, when {when}", claim=None, barred=True)


def _let_others_pass(
    now: Snapshot, setup: PoolSetup, devices: Devices, run: RunRow | None
) -> Obstacle | None:
    """Find a run that has not waited for the cluster yet, where this one did so in vain."""
    if run is None or run.name not in now.passed or not isinstance(devices[0], Shape):
        return None
    others = (one for one in now.queued if one.name not in now.passed)
    first = next((one for one in others if asks_cluster(now.asked[one.name])), None)
    if first is None:
        return None
    who = now.reader_of(run, setup).name_all([first])
    words = f"{devices[0].name} were not granted in time; {who} is tried before it"
    return Obstacle(words, claim=None, barred=True)


def _set_aside(now: Snapshot, devices: Devices, run: RunRow | None) -> Obstacle | None:
    """Find devices that are not for runs now, or for nothing of lorad."""
    found = [now.set_aside[device.name] for device in devices if device.name in now.set_aside]
    reasons = [aside.says for aside in found if aside.reserved or run is not None]
    return Obstacle("; ".join(reasons), claim=None, parts=reasons, barred=True) if reasons else None


def _beside_others(now: Snapshot, devices: Devices, run: RunRow | None) -> Obstacle | None:
    """Find who is on the devices, for a run that yields to them."""
    if not now.neighbours or run is None or not yields(run):
        return None
    names, settle = [device.name for device in devices], now.limits.foreign_settle
    there = [waits_for(now.neighbours[name], name, settle) for name in names if name in now.neighbours]
    return Obstacle("; ".join(there), claim=None, parts=there, barred=True) if there else None


def _limited(now: Snapshot, setup: PoolSetup, devices: Devices, run: RunRow | None) -> Obstacle | None:
    """Find the limit of devices of the pool's owner, whose idle pools give way.

    A pool that is up already takes no more than it has.
    """
    user = run.owner if run is not None else user_name(setup.owner if setup.owner >= 0 else os.getuid())
    limit = now.limits.limit_of(user).devices
    if limit is None:
        return None
    theirs = [pool for pool in now.pools if pool.setup.owner == setup.owner and now.is_used(pool)]
    if any(pool.setup.key == setup.key for pool in theirs):
        return None
    here, asked = {name for pool in theirs for name in pool.names}, {device.name for device in devices}
    held = len(here) + sum(shape_of(pool.setup.nodes).size for pool in theirs if pool.setup.nodes)
    wanted = devices[0].size if isinstance(devices[0], Shape) else len(devices)
    if held + (wanted if isinstance(devices[0], Shape) else len(asked - here)) <= limit:
        return None
    idle = [pool for pool in theirs if not (now.tenants_of(pool) or pool.serves or pool.guests)]
    more = f", it needs {wanted}" if wanted > 1 else ""
    reason = f"{user} has {held} of {limit} device{'' if limit == 1 else 's'}{more}"
    return Obstacle(reason, idle=idle, claim=None, barred=True)


def _used_by_pools(now: Snapshot, setup: PoolSetup, devices: Devices, run: RunRow | None) -> Obstacle | None:
    """Find the pools, or others, that use the devices."""
    holders, reader = now.in_the_way(setup, devices, run), now.reader_of(run, setup)
    for pool in holders:
        where = f"{reader.name_pool(pool)} on {pool.where}"
        if pool.stop_asked is not None:
            return Obstacle(f"{where} is stopping", soon=True)
        if pool.leaves:
            return Obstacle(f"{reader.name_pool(pool)} stops: {pool.leaves}", soon=True)
        if pool.setup.key == setup.key:
            return None if run is None else _crowding(now, pool, run)
        if tenants := now.tenants_of(pool):
            return _busy(pool, tenants, run, reader)
        if pool.serves:
            return Obstacle(f"{where} {reader.served_by(pool)}; `lorad serve --stop` lets it end", claim=None)
        if pool.guests:
            return Obstacle(f"{where} answers a request", soon=True)
    if in_use := by_others(now, devices):
        return in_use
    if holders:
        names = ", ".join(f"{reader.name_pool(pool)} on {pool.where}" for pool in holders)
        return Obstacle(f"waiting for idle {names} to end", idle=holders, soon=True)
    return None


def by_others(now: Snapshot, devices: Devices) -> Obstacle | None:
    """Find devices that other daemons hold, or that processes outside of any pool use."""
    if taken := tuple(device for device in devices if device.name in now.taken):
        words = [now.taken[device.name].words for device in taken]
        return Obstacle("; ".join(words), claim=None, taken=taken, parts=words)
    found = [now.occupied[device.name] for device in devices if device.name in now.occupied]
    if not found:
        return None
    reasons, is_known = [reason for reason, _ in found], not any(soon for _, soon in found)
    return Obstacle("; ".join(reasons), claim=None if is_known else True, soon=not is_known, parts=reasons)


def _busy(pool: Pool, tenants: list[RunRow], run: RunRow | None, reader: Reader) -> Obstacle:
    """Describe a pool of another kind with runs in it. Runs that leave anyway need not be asked."""
    leaving = all(tenant.state == RunState.STOPPING for tenant in tenants)
    if run is not None and any(tenant.preempted == run.name for tenant in tenants):
        names = reader.name_all(tenants)
        return Obstacle(f"{names} {_stops(tenants)} to make room on {pool.where}", soon=leaving)
    if pool.is_waiting:
        there = "is" if len(tenants) == 1 else "are"
        return Obstacle(
            f"{reader.name_all(tenants)} {there} before it: waits for {pool.where} of the cluster",
            soon=leaving,
        )
    end = "it ends" if len(tenants) == 1 else "they end"
    then = "" if run is None else f"; starts when {end}"  # a request is refused, where a run waits
    busy = f"{reader.name_pool(pool)} is busy with {reader.name_all(tenants)}"
    return Obstacle(f"{busy}{then}", soon=leaving)


def _stops(tenants: Sequence[RunRow]) -> str:
    return "stops at its next step" if len(tenants) == 1 else "stop at their next steps"


def _crowding(now: Snapshot, pool: Pool, run: RunRow) -> Obstacle | None:
    """Find what keeps a run out of a pool of the right kind, because of the runs in it."""
    tenants, reader = now.tenants_of(pool), now.reader_of(run, pool.setup)
    found = _crowded(now, pool, tenants, run, reader)
    going = [tenant for tenant in tenants if tenant.preempted == run.name]
    if found is None or not going:
        return found
    reason = f"{reader.name_all(going)} {_stops(going)} to make room in pool {pool.id}"
    return replace(found, reason=reason, soon=True)


def _crowded(
    now: Snapshot, pool: Pool, tenants: list[RunRow], run: RunRow, reader: Reader
) -> Obstacle | None:
    leaving = any(tenant.state == RunState.STOPPING for tenant in tenants)
    alone_there = next((tenant for tenant in tenants if spec_of(tenant).resources.exclusive), None)
    if alone_there is not None:
        reason = f"{reader.name_all([alone_there])} has pool {pool.id} for itself; starts when it ends"
        return Obstacle(reason, soon=leaving)
    there = "is" if len(tenants) == 1 else "are"
    if tenants and spec_of(run).resources.exclusive:
        reason = (
            f"it is to have pool {pool.id} for itself (resources.exclusive); {reader.name_all(tenants)} "
            f"{there} in it"
        )
        return Obstacle(reason, soon=all(tenant.state == RunState.STOPPING for tenant in tenants))
    lack = lack_of(run, pool.setup.dtype, now.room[pool.id])
    count = f"{len(tenants)} run{'' if len(tenants) == 1 else 's'} {there} in it"
    return Obstacle(f"pool {pool.id} {lack.says}; {count}", claim=False, soon=leaving) if lack else None
