"""Runs of lower priority stop at their next step for one of higher priority, and are queued again.

They pause with a checkpoint, so nothing is lost but the time until there is room again. Nobody is stopped in
vain: not where something else would still be in the way, nor while somebody leaves anyway, nor more runs than
    the room takes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from lorad.daemon.context import Context, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.queue.capacity import capacity_of, lacking, promised
from lorad.daemon.queue.obstacles import Devices, Obstacle, by_others, pools_on
from lorad.daemon.queue.tenants import active_runs, need_of_run, needs_of, tenants_of, told
from lorad.protocol.pool_setup import PoolSetup
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.rows import RunRow, RunSummary

log = logging.getLogger("lorad.daemon")


def make_room(
    ctx: Context, run: RunRow, setups: Mapping[Devices, PoolSetup], found: Mapping[Devices, Obstacle]
) -> Devices | None:
    """The devices on which room is being made for a run that waits: others are asked to stop there, unless
    something gives way anyway. None: nowhere."""
    contested = [devices for devices, there in found.items() if not there.barred]
    if soon := next((devices for devices in contested if found[devices].soon), None):
        return soon
    if not ctx.config.queue.preemption or not any(may_stop(run, other) for other in active_runs(ctx)):
        return None
    plans = {devices: victims_on(ctx, run, setups[devices], devices) for devices in contested}
    possible = {devices: victims for devices, victims in plans.items() if victims}
    if not possible:
        return None
    devices = min(possible, key=lambda one: cost(possible[one]))
    stop_for(ctx, run, possible[devices])
    return devices


def cost(victims: list[RunRow]) -> tuple[int, int, float]:
    """Rank victims: few before many, then those of low priority, then the youngest."""
    return len(victims), max(victim.priority for victim in victims), -min(v.created_at for v in victims)


def victims_on(ctx: Context, run: RunRow, setup: PoolSetup, devices: Devices) -> list[RunRow]:
    """List the runs that have to stop so that the run can have a pool of `setup` here; [] when that would not
    help.
    """
    holders, victims = pools_on(ctx, devices), []
    if by_others(ctx, devices, holders):
        return []
    for pool in holders:
        if pool.setup.key == setup.key:
            chosen = crowd(ctx, run, setup, pool)
        elif pool.serves or pool.guests:
            return []
        else:
            chosen = tenants_of(ctx, pool)
        if not all(may_stop(run, tenant) for tenant in chosen):
            return []
        victims += chosen
    return [victim for victim in victims if victim.state != RunState.STOPPING]


def may_stop(run: RunRow, tenant: RunRow) -> bool:
    leaves = tenant.state == RunState.STOPPING
    return leaves or (tenant.priority < run.priority and spec_of(tenant).resources.preemptible)


def crowd(ctx: Context, run: RunRow, setup: PoolSetup, pool: Pool) -> list[RunRow]:
    """List the runs that have to leave the pool which the run is to join.

    [] when that would not help, and while the pool still counts some that left.
    """
    tenants = tenants_of(ctx, pool)
    if spec_of(run).resources.exclusive or any(spec_of(tenant).resources.exclusive for tenant in tenants):
        return tenants
    there = {tenant.name for tenant in tenants}
    if pool.status is not None and any(tenant.run not in there for tenant in pool.status.tenants):
        return []
    order = sorted((t for t in tenants if may_stop(run, t)), key=lambda t: (t.priority, -t.created_at))
    leaving: list[RunRow] = []
    while order and not fits(ctx, run, setup, pool, leaving):
        leaving.append(order.pop(0))
    if not fits(ctx, run, setup, pool, leaving):
        return []
    for victim in reversed(leaving):
        without = [one for one in leaving if one is not victim]
        leaving = without if fits(ctx, run, setup, pool, without) else leaving
    return leaving


def fits(ctx: Context, run: RunRow, setup: PoolSetup, pool: Pool, leaving: list[RunRow]) -> bool:
    """Check whether the pool has room for the run when those have left."""
    gone = {victim.name for victim in leaving}
    status, capacity = pool.status, capacity_of(pool.setup.server, pool.status)
    if status is not None:
        freed = sum(tenant.bytes for tenant in status.tenants if tenant.run in gone)
        capacity = replace(capacity, memory_used=max(0, capacity.memory_used - freed))
        status = replace(status, tenants=[tenant for tenant in status.tenants if tenant.run not in gone])
    stay = {tenancy: need for tenancy, need in needs_of(ctx, pool).items() if tenancy[0] not in gone}
    return lacking(promised(capacity, stay, status), need_of_run(run, setup.dtype)) is None


def stop_for(ctx: Context, run: RunRow, victims: list[RunRow]) -> None:
    name = run.name
    log.info("run %s: preempts %s", name, told(victims))
    with ctx.store.write():
        for victim in victims:
            ctx.move(victim.name, Move.STOP, detail=f"preempted by {name}")
            runs.set_fields(ctx.store, victim.name, wanted="pause", preempted=name)
    ctx.loop.poke()  # runs that wait say so in the next pass


def queue_again(ctx: Context, run: RunRow) -> None:
    """Queue a run again that was paused to make room, in the same transaction:
    it resumes when there is room.
    """
    if run.preempted:
        ctx.move(run.name, Move.RESUME, detail=f"preempted by {run.preempted}")
        runs.set_fields(ctx.store, run.name, preempted=run.preempted)


def told_of(row: RunSummary, waiting: str) -> str:
    """Say why a run waits, and for which run it made room."""
    if not row.preempted:
        return waiting
    if row.state == RunState.STOPPING:
        return f"being preempted by {row.preempted}"
    return "; ".join(part for part in (f"preempted by {row.preempted}", waiting) if part)
