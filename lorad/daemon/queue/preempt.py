"""Runs of lower priority stop at their next step for one of higher priority, and are queued again.

They pause with a checkpoint, so nothing is lost but the time until there is room again. Nobody is stopped in
vain: not where something else would still be in the way, nor while somebody leaves anyway, nor more runs than
the room takes.
"""

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from lorad.daemon.access import EVERYTHING, name_for, owner_of
from lorad.daemon.context import Context, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.queue.obstacles import Hindrance, Obstacle, by_others
from lorad.daemon.queue.setups import Placement
from lorad.daemon.queue.snapshot import Snapshot
from lorad.daemon.queue.tenants import capacity_of, lacking, need_in, needs_of, promised
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.rows import RunRow, RunSummary

log = logging.getLogger("lorad.daemon")


def choose_victims(
    now: Snapshot, run: RunRow, tried: Sequence[tuple[Placement, Obstacle]]
) -> tuple[Placement | None, list[RunRow]]:
    """Choose the place where room is made for a run that waits, and the runs that have to stop for it.

    None where nothing gives way; [] where something gives way anyway. The choice falls on few runs before
    many, then on those of low priority, then on the youngest.

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
    if by_others(now, place.devices):
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
    """List the runs that have to leave the pool which the run is to join.

    [] when that would not help, and while the pool still counts some that left.
    """
    tenants = now.tenants_of(pool)
    if spec_of(run).resources.exclusive or any(spec_of(tenant).resources.exclusive for tenant in tenants):
        return tenants
    names = {tenant.name for tenant in tenants}
    if pool.status is not None and any(tenant.run not in names for tenant in pool.status.tenants):
        return []

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


def stop_for(ctx: Context, run: RunRow, victims: Sequence[RunRow]) -> None:
    """Ask runs to pause, so that `run` has room."""
    name = run.name
    log.info("run %s: preempts %s", name, EVERYTHING.name_all(victims))
    with ctx.store.write():
        for victim in victims:
            wish = {"wanted": "pause", "preempted": name}
            why = f"preempted by {owner_of(ctx, victim).name(run)}"
            runs.move(ctx.store, victim.name, Move.STOP, detail=why, also=wish)
    ctx.loop.poke()  # runs that wait say so in the next pass


def queue_again(ctx: Context, run: RunRow) -> None:
    """Queue a run again that was paused to make room, in the same transaction:
    it resumes when there is room.
    """
    if run.preempted:
        why = f"preempted by {name_for(ctx, run, run.preempted)}"
        runs.move(ctx.store, run.name, Move.RESUME, detail=why, also={"preempted": run.preempted})
    elif run.yielded:
        runs.move(ctx.store, run.name, Move.RESUME, detail=run.yielded)


def told_of(ctx: Context, row: RunSummary, waiting: str) -> str:
    """Say why a run waits, and for which run it made room."""
    if row.yielded:
        return f"stops at its next step: {row.yielded}"
    if not row.preempted:
        return waiting
    other = name_for(ctx, row, row.preempted)
    if row.state == RunState.STOPPING:
        return f"being preempted by {other}"
    return "; ".join(part for part in (f"preempted by {other}", waiting) if part)
