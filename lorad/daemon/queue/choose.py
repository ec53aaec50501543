"""Choose the pool that a run or a request gets, or say what it waits for.

The loop's placing, the forecasts and the queue played in thought all ask here, so that they agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lorad.box.runtime import Decision
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import NodesShape
from lorad.daemon.pool import Pool
from lorad.daemon.queue.limits import over_limit
from lorad.daemon.queue.obstacles import Hindrance, Obstacle, WaitingRun, obstacle
from lorad.daemon.queue.preempt import choose_victims
from lorad.daemon.queue.setups import Devices, Placement
from lorad.daemon.queue.snapshot import Snapshot
from lorad.daemon.queue.tenants import never_fits
from lorad.protocol.listener import user_name
from lorad.store.rows import RunRow


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
    candidates = [fitted(now, run, place) for place in now.candidates_of(run)]
    never = never_fits(run, [place.setup for place in candidates], now.pools)
    stranger = ctx.queue.strangers.get(run.owner_uid)
    if not never and stranger is not None and all(place.setup.nodes for place in candidates):
        never = (
            f"the cluster works as {user_name(stranger)} (uid {stranger}), and the run is {run.owner}'s "
            f"(uid {run.owner_uid}): a cluster is for one user alone"
        )
    if never:
        return Blocked(never, frozenset({Hindrance.NEVER}))
    return choose_devices(now, candidates, run, claims)


def fitted(now: Snapshot, run: RunRow, place: Placement) -> Placement:
    """Fit the pool that a run asks for to those that exist: take a warm pool's threads where only the load
    decides.

    A server may take more than the run needs, if it is that of a warm pool or of the pool that the run had;
    one that has not started gets the ranks and lengths of all runs in the queue that could share it.
    """
    setup = place.setup
    for pool in now.pools:
        is_warm = pool.stop_asked is None and now.is_used(pool)
        if (is_warm or pool.id == run.pool) and pool.setup.takes(setup):
            taken = msgspec.structs.replace(setup, server=pool.setup.server).taught_by(pool.setup)
            return place._replace(setup=taken)
        free = msgspec.structs.replace(setup, threads=pool.setup.threads)
        if is_warm and place.why.source == "load" and pool.setup.takes(free):
            warm = msgspec.structs.replace(free, server=pool.setup.server).taught_by(pool.setup)
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
    tried: list[tuple[Placement, Obstacle]] = []
    for place in sorted(candidates, key=lambda place: place.setup.key not in warm):
        in_the_way = obstacle(now, place, run, claims)
        if in_the_way is None:
            return place
        tried.append((place, in_the_way))
    victims: Sequence[RunRow] = ()
    claims_here: list[WaitingRun] = []
    if run is not None:
        cleared, victims = choose_victims(now, run, tried)
        cleared_first = sorted(tried, key=lambda item: item[0] is not cleared)
        claims_here = [WaitingRun(run, place, o.claim) for place, o in cleared_first if o.claim is not None]
    obstacles = [in_the_way for _, in_the_way in tried]
    why = "; ".join(dict.fromkeys(part for o in obstacles for part in o.parts or (o.reason,)))
    if len(now.devices) > 1 and not all(isinstance(place.devices[0], NodesShape) for place, _ in tried):
        why = f"{now.count_free()} of {len(now.devices)} devices free; {why}"
    return Blocked(
        why,
        frozenset(o.by for o in obstacles),
        idle=next((o.idle for o in obstacles if o.idle), ()),
        taken=[o.taken for o in obstacles if o.taken],
        victims=victims,
        claims=claims_here[:1],
    )
