"""What keeps a run from devices: runs before it in the queue, limits of its user, pools, and other people."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lorad.daemon.access import Reader
from lorad.daemon.context import spec_of
from lorad.daemon.gpu.devices import NodesShape, shape_of
from lorad.daemon.pool import Pool
from lorad.daemon.queue.neighbours import waits_for
from lorad.daemon.queue.setups import Devices, Placement
from lorad.daemon.queue.snapshot import Snapshot, asks_cluster
from lorad.daemon.queue.tenants import lacking, need_in
from lorad.protocol.listener import user_name
from lorad.states import RunState
from lorad.store.rows import RunRow


class Hindrance(StrEnum):
    """Who keeps a run or a request from having a pool."""

    NEVER = "never"  # nobody: no pool can ever take it
    LIMIT = "limit"  # a limit of its user, wherever it would go
    QUEUE = "queue"  # a run before it in the queue
    ASIDE = "aside"  # whoever reserved devices or wants quiet hours
    NEIGHBOUR = "neighbour"  # a program that it yields to
    DEVICES = "devices"  # a limit of its user's devices
    POOLS = "pools"  # pools of this daemon, and the runs in them
    OTHERS = "others"  # other daemons or programs


@dataclass(frozen=True)
class WaitingRun:
    """A run that waits for a place.

    alone: it needs all other runs to be gone; else it only needs more room.
    """

    run: RunRow
    place: Placement
    alone: bool

    def holds_up(self, run: RunRow, place: Placement) -> bool:
        """Check whether `run`, which comes after it, may not have a place before it.

        On a cluster only the same pool is held up, as others may have other nodes.
        """
        if place.setup.nodes:
            is_same = place.setup.key == self.place.setup.key
        else:
            is_same = not {*place.devices}.isdisjoint(self.place.devices)
        return is_same and (self.alone or self.run.priority > run.priority)


@dataclass(frozen=True)
class Obstacle:
    """Why devices cannot be had now.

    reason: what is in the way, in words.
    by: who is in the way.
    idle: pools that need only be stopped.
    claim: what `WaitingRun.alone` is for a run that waits here; None where it claims nothing.
    soon: it goes away without any further action.
    taken: devices that are held by others than this daemon's pools.
    parts: parts of the reason, which other obstacles may share.
    """

    reason: str
    by: Hindrance = Hindrance.POOLS
    idle: Sequence[Pool] = ()
    claim: bool | None = True
    soon: bool = False
    taken: Devices = ()
    parts: Sequence[str] = ()


def obstacle(
    now: Snapshot, place: Placement, run: RunRow | None, claims: Sequence[WaitingRun]
) -> Obstacle | None:
    """Find what keeps a pool from being at a place now, with `run` in it.

    claims: the runs before it that wait.
    """
    if run is not None and (ahead := _before_it(now, place, run, claims)):
        return ahead
    names = [device.name for device in place.devices]
    asides = [now.set_aside[name] for name in names if name in now.set_aside]
    reasons = [aside.says for aside in asides if aside.reserved or run is not None]
    if reasons:
        return Obstacle("; ".join(reasons), Hindrance.ASIDE, claim=None, parts=reasons)
    if run is not None and (reasons := waits_for(run, names, now.neighbours, now.limits.foreign_settle)):
        return Obstacle("; ".join(reasons), Hindrance.NEIGHBOUR, claim=None, parts=reasons)
    return _limited(now, place, run) or _used_by_pools(now, place, run)


def _before_it(now: Snapshot, place: Placement, run: RunRow, claims: Sequence[WaitingRun]) -> Obstacle | None:
    """Find the run before this one that must not be passed; or one that has not waited for the cluster yet,
    where this one did so in vain.
    """
    first = next((claim for claim in claims if claim.holds_up(run, place)), None)
    if first is not None:
        names = ", ".join(device.name for device in place.devices)
        when = "the others end" if first.alone else "it fits"
        who = now.reader_of(run, place.setup).name_all([first.run])
        return Obstacle(f"{who} is next on {names}, when {when}", Hindrance.QUEUE, claim=None)
    if run.name not in now.passed or not isinstance(place.devices[0], NodesShape):
        return None
    others = (other for other in now.queued if other.name not in now.passed)
    other = next((other for other in others if asks_cluster(now.candidates[other.name])), None)
    if other is None:
        return None
    who = now.reader_of(run, place.setup).name_all([other])
    words = f"{place.devices[0].name} were not granted in time; {who} is tried before it"
    return Obstacle(words, Hindrance.QUEUE, claim=None)


def _limited(now: Snapshot, place: Placement, run: RunRow | None) -> Obstacle | None:
    """Find the limit of devices of the pool's owner, whose idle pools give way.

    A pool that is up already takes no more than it has.
    """
    devices, setup, _ = place
    user = run.owner if run is not None else user_name(setup.owner if setup.owner >= 0 else os.getuid())
    limit = now.limits.limit_of(user).devices
    if limit is None:
        return None
    own_pools = [pool for pool in now.pools if pool.setup.owner == setup.owner and now.is_used(pool)]
    if any(pool.setup.key == setup.key for pool in own_pools):
        return None
    names = {name for pool in own_pools for name in pool.names}
    count = len(names) + sum(shape_of(pool.setup.nodes).size for pool in own_pools if pool.setup.nodes)
    shape = devices[0] if isinstance(devices[0], NodesShape) else None
    needs = shape.size if shape else len(devices)
    more = needs if shape else len({device.name for device in devices} - names)
    if count + more <= limit:
        return None
    idle = [pool for pool in own_pools if not (now.tenants_of(pool) or pool.serves or pool.guests)]
    needed = f", it needs {needs}" if needs > 1 else ""
    reason = f"{user} has {count} of {limit} device{'' if limit == 1 else 's'}{needed}"
    return Obstacle(reason, Hindrance.DEVICES, idle=idle, claim=None)


def _used_by_pools(now: Snapshot, place: Placement, run: RunRow | None) -> Obstacle | None:
    """Find the pools, or others, that use the devices."""
    holders = now.blockers(place, run)
    reader = now.reader_of(run, place.setup)
    for pool in holders:
        where = f"{reader.name_pool(pool)} on {pool.where}"
        if pool.stop_asked is not None:
            return Obstacle(f"{where} is stopping", soon=True)
        if pool.leaves:
            return Obstacle(f"{reader.name_pool(pool)} stops: {pool.leaves}", soon=True)
        if pool.setup.key == place.setup.key:
            return None if run is None else _crowding(now, pool, run)
        if tenants := now.tenants_of(pool):
            return _busy(pool, tenants, run, reader)
        if pool.serves:
            return Obstacle(f"{where} {reader.served_by(pool)}; `lorad serve --stop` lets it end", claim=None)
        if pool.guests:
            return Obstacle(f"{where} answers a request", soon=True)
    if in_use := by_others(now, place.devices):
        return in_use
    if holders:
        names = ", ".join(f"{reader.name_pool(pool)} on {pool.where}" for pool in holders)
        return Obstacle(f"waiting for idle {names} to end", idle=holders, soon=True)
    return None


def by_others(now: Snapshot, devices: Devices) -> Obstacle | None:
    """Find devices that other daemons hold, or that processes outside of any pool use."""
    if taken := tuple(device for device in devices if device.name in now.taken):
        words = [now.taken[device.name].words for device in taken]
        return Obstacle("; ".join(words), Hindrance.OTHERS, claim=None, taken=taken, parts=words)
    occupied = [now.occupied[device.name] for device in devices if device.name in now.occupied]
    if not occupied:
        return None
    reasons = [reason for reason, _ in occupied]
    soon = any(soon for _, soon in occupied)
    claim = True if soon else None
    return Obstacle("; ".join(reasons), Hindrance.OTHERS, claim=claim, soon=soon, parts=reasons)


def _busy(pool: Pool, tenants: list[RunRow], run: RunRow | None, reader: Reader) -> Obstacle:
    """Describe a pool of another kind with runs in it. Runs that leave anyway need not be asked."""
    leaving = all(tenant.state == RunState.STOPPING for tenant in tenants)
    if run is not None and any(tenant.preempted == run.name for tenant in tenants):
        names = reader.name_all(tenants)
        return Obstacle(f"{names} {_stops(tenants)} to make room on {pool.where}", soon=leaving)
    if pool.is_waiting:
        are = "is" if len(tenants) == 1 else "are"
        names = reader.name_all(tenants)
        return Obstacle(f"{names} {are} before it: waits for {pool.where} of the cluster", soon=leaving)
    end = "it ends" if len(tenants) == 1 else "they end"
    then = "" if run is None else f"; starts when {end}"  # a request is refused, where a run waits
    busy = f"{reader.name_pool(pool)} is busy with {reader.name_all(tenants)}"
    return Obstacle(f"{busy}{then}", soon=leaving)


def _stops(tenants: Sequence[RunRow]) -> str:
    return "stops at its next step" if len(tenants) == 1 else "stop at their next steps"


def _crowding(now: Snapshot, pool: Pool, run: RunRow) -> Obstacle | None:
    """Find what keeps a run out of a pool of the right kind, because of the runs in it."""
    tenants = now.tenants_of(pool)
    reader = now.reader_of(run, pool.setup)
    leaving = [tenant for tenant in tenants if tenant.state == RunState.STOPPING]
    alone_there = next((tenant for tenant in tenants if spec_of(tenant).resources.exclusive), None)
    are = "is" if len(tenants) == 1 else "are"
    if alone_there is not None:
        reason = f"{reader.name_all([alone_there])} has pool {pool.id} for itself; starts when it ends"
        crowded = Obstacle(reason, soon=bool(leaving))
    elif tenants and spec_of(run).resources.exclusive:
        alone = f"it is to have pool {pool.id} for itself (resources.exclusive)"
        crowded = Obstacle(f"{alone}; {reader.name_all(tenants)} {are} in it", soon=leaving == tenants)
    elif lack := lacking(now.room[pool.id], need_in(run, pool.setup.dtype)):
        count = f"{len(tenants)} run{'' if len(tenants) == 1 else 's'} {are} in it"
        crowded = Obstacle(f"pool {pool.id} {lack.says}; {count}", claim=False, soon=bool(leaving))
    else:
        return None
    if going := [tenant for tenant in tenants if tenant.preempted == run.name]:
        reason = f"{reader.name_all(going)} {_stops(going)} to make room in pool {pool.id}"
        crowded = replace(crowded, reason=reason, soon=True)
    return crowded
