"""Choose the pool that a run or a request gets, or say what it waits for (a limit of its user, runs before it
in the queue, pools, other people) and which runs of lower priority are to stop for it.

The loop's placing, the forecasts and the queue played in thought all ask here, so that they agree. No run is
stopped in vain: not where something else would still be in the way, nor while something leaves anyway, and no
more of them than it takes.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from lorad.box.runtime import Decision
from lorad.daemon.access import Reader
from lorad.daemon.context import Context, spec_of
from lorad.daemon.gpu.devices import NodesShape, shape_of
from lorad.daemon.pool import Pool
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.limits import over_limit
from lorad.daemon.queue.neighbours import waits_for
from lorad.daemon.queue.setups import Devices, Placement
from lorad.daemon.queue.snapshot import Snapshot
from lorad.daemon.queue.tenants import capacity_of, impossible, lacking, need_in, needs_of, promised
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
class _Obstacle:
    """Why devices cannot be had now.

    reasons: what is in the way, in words; other obstacles may share some of them.
    by: who is in the way.
    idle: pools that need only be stopped.
    claim: what `WaitingRun.alone` is for a run that waits here; None where it claims nothing.
    soon: it goes away without any further action.
    taken: devices that are held by others than this daemon's pools.
    """

    reasons: Sequence[str]
    by: Hindrance = Hindrance.POOLS
    idle: Sequence[Pool] = ()
    claim: bool | None = True
    soon: bool = False
    taken: Devices = ()


@dataclass(frozen=True)
class Blocked:
    """What a run or a request waits for, and what makes room for it.

    why: what is in the way, in words.
    by: who is in the way, on any of its devices.
    idle: pools that are in the way and need only be stopped.
    taken: groups of devices that other daemons hold.
    victims: runs that have to stop.
    claims: what the run keeps for itself from the runs behind it, one at most.
    """

    why: str
    by: frozenset[Hindrance]
    idle: Sequence[Pool] = ()
    taken: Sequence[Devices] = ()
    victims: Sequence[RunRow] = ()
    claims: Sequence[WaitingRun] = ()


def choose(
    ctx: Context, now: Snapshot, run: RunRow, claims: Sequence[WaitingRun] = (), at: float | None = None
) -> Placement | Blocked:
    """Choose the pool of a queued run.

    claims: what runs before it in the queue wait for.
    at: Unix time; None: now.

    Raises SpecError, StorageError, OSError where its files cannot be read.
    """
    if over := over_limit(ctx, run, now.active, at):
        return Blocked(over, frozenset({Hindrance.LIMIT}))
    places = now.candidates[run.name]
    if isinstance(places, Exception):
        raise places
    candidates = [fitted(now, run, place) for place in places]
    reasons = []  # why none could take it even if it were empty; a pool to come has the default capacity
    for setup in (place.setup for place in candidates):
        status = next((pool.status for pool in now.pools if pool.setup.key == setup.key), None)
        reasons.append(impossible(capacity_of(setup.server, status), need_in(run, setup.dtype)))
    never = reasons[0] if all(reasons) else ""
    stranger = ctx.queue.strangers.get(run.owner_uid)
    if not never and stranger is not None and all(place.setup.nodes for place in candidates):
        other = f"the cluster works as {user_name(stranger)} (uid {stranger})"
        own = f"the run is {run.owner}'s (uid {run.owner_uid})"
        never = f"{other}, and {own}: a cluster is for one user alone"
    if never:
        return Blocked(never, frozenset({Hindrance.NEVER}))
    return choose_devices(now, candidates, run, claims)


def fitted(now: Snapshot, run: RunRow, place: Placement) -> Placement:
    """Fit the pool that a run asks for to those that exist.

    Where only the load decides on its threads, it gets those of a warm pool. A server may take more than the
    run needs, if it is that of a warm pool or of the pool that the run had; one that has not started gets the
    ranks and lengths of all runs in the queue that could share it.
    """
    setup = place.setup
    for pool in now.pools:
        is_warm = pool.stop_asked is None and now.is_used(pool)
        if (is_warm or pool.id == run.pool) and pool.setup.takes(setup):
            warm_setup = replace(setup, server=pool.setup.server).taught_by(pool.setup)
            return place._replace(setup=warm_setup)
        free = replace(setup, threads=pool.setup.threads)
        if is_warm and place.why.source == "load" and pool.setup.takes(free):
            warm = replace(free, server=pool.setup.server).taught_by(pool.setup)
            return place._replace(setup=warm, why=Decision("load", f"pool {pool.id} is warm and has as many"))
    if setup.server is None:
        return place
    return place._replace(setup=setup.widened(now.widest.get((place.devices, setup.kind), setup)))


def choose_devices(
    now: Snapshot,
    candidates: Sequence[Placement],
    run: RunRow | None = None,
    claims: Sequence[WaitingRun] = (),
) -> Placement | Blocked:
    """Choose devices that a pool may have now. Warm pools go before free devices.

    run: the one that is to train there; None for a pool that only serves.
    claims: what runs before it in the queue wait for.
    """
    warm = {pool.setup.key for pool in now.pools if pool.process.is_up}
    tried: list[tuple[Placement, _Obstacle]] = []
    for place in sorted(candidates, key=lambda place: place.setup.key not in warm):
        in_the_way = _obstacle(now, place, run, claims)
        if in_the_way is None:
            return place
        tried.append((place, in_the_way))
    victims: Sequence[RunRow] = ()
    claims_here: list[WaitingRun] = []
    if run is not None:
        cleared, victims = _choose_victims(now, run, tried)
        cleared_first = sorted(tried, key=lambda item: item[0] is not cleared)
        claims_here = [WaitingRun(run, place, o.claim) for place, o in cleared_first if o.claim is not None]
    obstacles = [in_the_way for _, in_the_way in tried]
    why = "; ".join(dict.fromkeys(reason for o in obstacles for reason in o.reasons))
    if len(now.devices) > 1 and not all(isinstance(place.devices[0], NodesShape) for place, _ in tried):
        others = now.taken.keys() | now.occupied.keys() | now.set_aside.keys()
        free = sum(device.name not in others and not now.pools_on((device,)) for device in now.devices)
        why = f"{free} of {len(now.devices)} devices free; {why}"
    return Blocked(
        why,
        frozenset(o.by for o in obstacles),
        idle=next((o.idle for o in obstacles if o.idle), ()),
        taken=[o.taken for o in obstacles if o.taken],
        victims=victims,
        claims=claims_here[:1],
    )


def _obstacle(
    now: Snapshot, place: Placement, run: RunRow | None, claims: Sequence[WaitingRun]
) -> _Obstacle | None:
    """Find what keeps a pool from being at a place now with `run` in it; `claims` are of runs before it."""
    names = [device.name for device in place.devices]
    owner = place.setup.owner if place.setup.owner >= 0 else os.getuid()
    caller = Caller(owner, user_name(owner)) if run is None else Caller(run.owner_uid, run.owner)
    reader = now.reader(caller)
    if run is not None:
        first = next((claim for claim in claims if claim.holds_up(run, place)), None)
        if first is not None:
            when = "the others end" if first.alone else "it fits"
            reason = f"{reader.name_all([first.run])} is next on {', '.join(names)}, when {when}"
            return _Obstacle([reason], Hindrance.QUEUE, claim=None)
        # one that waited for the cluster in vain goes behind those that have not waited yet
        untried = [other for other in now.queued if other.name in now.on_cluster - now.passed]
        if untried and run.name in now.passed and isinstance(place.devices[0], NodesShape):
            who = reader.name_all(untried[:1])
            reason = f"{place.devices[0].name} were not granted in time; {who} is tried before it"
            return _Obstacle([reason], Hindrance.QUEUE, claim=None)
    asides = [now.set_aside[name] for name in names if name in now.set_aside]
    reasons = [aside.says for aside in asides if aside.reserved or run is not None]
    if reasons:
        return _Obstacle(reasons, Hindrance.ASIDE, claim=None)
    if run is not None and (reasons := waits_for(run, names, now.neighbours, now.limits.foreign_settle)):
        return _Obstacle(reasons, Hindrance.NEIGHBOUR, claim=None)
    return _limited(now, place, caller.name) or _used_by_pools(now, place, run, reader)


def _limited(now: Snapshot, place: Placement, user: str) -> _Obstacle | None:
    """Find the limit of devices of the user whose pool it is; the user's idle pools give way.

    A pool that is up already takes no more devices than it has.
    """
    devices, setup, _ = place
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
    idle = [pool for pool in own_pools if not (pool.id in now.tenants or pool.serves or pool.guests)]
    needed = f", it needs {needs}" if needs > 1 else ""
    reason = f"{user} has {count} of {limit} device{'' if limit == 1 else 's'}{needed}"
    return _Obstacle([reason], Hindrance.DEVICES, idle=idle, claim=None)


def _used_by_pools(now: Snapshot, place: Placement, run: RunRow | None, reader: Reader) -> _Obstacle | None:
    """Find the pools or others that use the devices; `soon` where the runs there are leaving anyway."""
    holders = now.blockers(place, run)
    for pool in holders:
        where = f"{reader.name_pool(pool)} on {pool.where}"
        tenants = now.tenants_of(pool)
        leaving = all(tenant.state == RunState.STOPPING for tenant in tenants)
        if pool.stop_asked is not None:
            return _Obstacle([f"{where} is stopping"], soon=True)
        if pool.leaves:
            return _Obstacle([f"{reader.name_pool(pool)} stops: {pool.leaves}"], soon=True)
        if pool.setup.key == place.setup.key:
            return None if run is None else _crowding(now, pool, run, reader)
        if run is not None and any(tenant.preempted == run.name for tenant in tenants):
            stops = f"{reader.name_all(tenants)} {_stops(tenants)}"
            return _Obstacle([f"{stops} to make room on {pool.where}"], soon=leaving)
        if tenants and pool.is_waiting:
            before = f"{reader.name_all(tenants)} {'is' if len(tenants) == 1 else 'are'} before it"
            return _Obstacle([f"{before}: waits for {pool.where} of the cluster"], soon=leaving)
        if tenants:
            end = "it ends" if len(tenants) == 1 else "they end"
            then = "" if run is None else f"; starts when {end}"  # a request is refused, where a run waits
            busy = f"{reader.name_pool(pool)} is busy with {reader.name_all(tenants)}"
            return _Obstacle([f"{busy}{then}"], soon=leaving)
        if pool.serves:
            served = reader.served_by(pool)
            return _Obstacle([f"{where} {served}; `lorad serve --stop` lets it end"], claim=None)
        if pool.guests:
            return _Obstacle([f"{where} answers a request"], soon=True)
    if in_use := _by_others(now, place.devices):
        return in_use
    if holders:
        names = ", ".join(f"{reader.name_pool(pool)} on {pool.where}" for pool in holders)
        return _Obstacle([f"waiting for idle {names} to end"], idle=holders, soon=True)
    return None


def _by_others(now: Snapshot, devices: Devices) -> _Obstacle | None:
    """Find devices that other daemons hold, or that processes outside of any pool use."""
    if leased := tuple(device for device in devices if device.name in now.taken):
        words = [now.taken[device.name].words for device in leased]
        return _Obstacle(words, Hindrance.OTHERS, claim=None, taken=leased)
    occupied = [now.occupied[device.name] for device in devices if device.name in now.occupied]
    if not occupied:
        return None
    soon = any(soon for _, soon in occupied)
    reasons = [reason for reason, _ in occupied]
    return _Obstacle(reasons, Hindrance.OTHERS, claim=True if soon else None, soon=soon)


def _stops(tenants: Sequence[RunRow]) -> str:
    return "stops at its next step" if len(tenants) == 1 else "stop at their next steps"


def _crowding(now: Snapshot, pool: Pool, run: RunRow, reader: Reader) -> _Obstacle | None:
    """Find what keeps a run out of a pool of the right kind, because of the runs in it."""
    tenants = now.tenants_of(pool)
    leaving = [tenant for tenant in tenants if tenant.state == RunState.STOPPING]
    alone_there = next((tenant for tenant in tenants if spec_of(tenant).resources.exclusive), None)
    are = "is" if len(tenants) == 1 else "are"
    if alone_there is not None:
        reason = f"{reader.name_all([alone_there])} has pool {pool.id} for itself; starts when it ends"
        crowded = _Obstacle([reason], soon=bool(leaving))
    elif tenants and spec_of(run).resources.exclusive:
        alone = f"it is to have pool {pool.id} for itself (resources.exclusive)"
        crowded = _Obstacle([f"{alone}; {reader.name_all(tenants)} {are} in it"], soon=leaving == tenants)
    elif lack := lacking(now.room[pool.id], need_in(run, pool.setup.dtype)):
        count = f"{len(tenants)} run{'' if len(tenants) == 1 else 's'} {are} in it"
        crowded = _Obstacle([f"pool {pool.id} {lack.says}; {count}"], claim=False, soon=bool(leaving))
    else:
        return None
    if going := [tenant for tenant in tenants if tenant.preempted == run.name]:
        reason = f"{reader.name_all(going)} {_stops(going)} to make room in pool {pool.id}"
        crowded = dataclasses.replace(crowded, reasons=[reason], soon=True)
    return crowded


def _choose_victims(
    now: Snapshot, run: RunRow, tried: Sequence[tuple[Placement, _Obstacle]]
) -> tuple[Placement | None, list[RunRow]]:
    """Choose the place where room is made for a run that waits, and the runs that have to stop for it.

    The place is None where nothing gives way, and no run has to stop where something gives way anyway. Few
    runs are chosen before many, then those of low priority, then the youngest.

    tried: the places that the run may have, with what is in the way there.
    """
    used = (Hindrance.POOLS, Hindrance.OTHERS)
    contested = [(place, obstacle.soon) for place, obstacle in tried if obstacle.by in used]
    if leaving := next((place for place, soon in contested if soon), None):
        return leaving, []
    if not now.limits.preemption or not any(_may_stop(run, other) for other in now.active):
        return None, []
    plans = [(place, _victims_at(now, run, place)) for place, _ in contested]

    def cost(plan: tuple[Placement, list[RunRow]]) -> tuple[int, int, float]:
        _, victims = plan
        return len(victims), max(victim.priority for victim in victims), -min(v.created_at for v in victims)

    return min((plan for plan in plans if plan[1]), key=cost, default=(None, []))


def _victims_at(now: Snapshot, run: RunRow, place: Placement) -> list[RunRow]:
    """List the runs that have to stop so that the run can have its pool here; [] when that would not help."""
    victims: list[RunRow] = []
    if _by_others(now, place.devices):
        return []
    for pool in now.blockers(place, run):
        if pool.setup.key == place.setup.key:
            chosen = _crowd(now, run, place.setup.dtype, pool)
        elif pool.serves or pool.guests:
            return []
        else:
            chosen = now.tenants_of(pool)
        if not all(_may_stop(run, tenant) for tenant in chosen):
            return []
        victims += chosen
    return [victim for victim in victims if victim.state != RunState.STOPPING]


def _may_stop(run: RunRow, tenant: RunRow) -> bool:
    leaves = tenant.state == RunState.STOPPING
    return leaves or (tenant.priority < run.priority and spec_of(tenant).resources.preemptible)


def _crowd(now: Snapshot, run: RunRow, dtype: str, pool: Pool) -> list[RunRow]:
    """List the runs that have to leave the pool which the run is to join; [] when that would not help."""
    tenants = now.tenants_of(pool)
    if spec_of(run).resources.exclusive or any(spec_of(tenant).resources.exclusive for tenant in tenants):
        return tenants
    names = {tenant.name for tenant in tenants}
    if pool.status is not None and any(tenant.run not in names for tenant in pool.status.tenants):
        return []  # it still counts some that left

    def fits(leaving: Sequence[RunRow]) -> bool:
        gone = {victim.name for victim in leaving}
        status = pool.status
        capacity = capacity_of(pool.setup.server, pool.status)
        if status is not None:
            freed = sum(tenant.bytes for tenant in status.tenants if tenant.run in gone)
            capacity = replace(capacity, memory_used=max(0, capacity.memory_used - freed))
            status = replace(status, tenants=[tenant for tenant in status.tenants if tenant.run not in gone])
        stay = needs_of(pool, [tenant for tenant in tenants if tenant.name not in gone])
        return lacking(promised(capacity, stay, status), need_in(run, dtype)) is None

    order = sorted((t for t in tenants if _may_stop(run, t)), key=lambda t: (t.priority, -t.created_at))
    leaving: list[RunRow] = []
    while order and not fits(leaving):
        leaving.append(order.pop(0))
    if not fits(leaving):
        return []
    for victim in reversed(leaving):
        without = [other for other in leaving if other is not victim]
        leaving = without if fits(without) else leaving
    return leaving
