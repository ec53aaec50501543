"""Decide which queued run goes where: by priority, then whose owner used the least lately; a pool takes many
runs if it has room.

A run that finds no room lets others pass that do. But where a run waits for the devices to itself
(`exclusive`, or for another base), no run behind it in the queue is placed there any more, and where one
waits for room, no run of a lower priority: so a run that waits for others to leave is not passed for ever.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lorad.box.runtime import Why
from lorad.daemon.access import anybody
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Shape
from lorad.daemon.guarded import each, of_run
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import find_or_make, stop_pool
from lorad.daemon.pools.threads import keep_runtime
from lorad.daemon.queue.limits import over_limit
from lorad.daemon.queue.obstacles import Claim, Obstacle, obstacle
from lorad.daemon.queue.preempt import choose_victims, stop_for
from lorad.daemon.queue.restart import wait_for_restart
from lorad.daemon.queue.setups import Asked, Devices
from lorad.daemon.queue.shares import places_in
from lorad.daemon.queue.snapshot import LOOKED_AT, Snapshot, take_snapshot
from lorad.daemon.queue.tenants import never_fits
from lorad.errors import LoradError
from lorad.protocol.listener import user_name
from lorad.protocol.pool_setup import PoolSetup
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.checkpoints import checkpoints
from lorad.store.foreseen import forecasts
from lorad.store.rows import QueuedRow, RunRow

PLACE_SECONDS = 0.02  # in one pass, once a run was placed
FAR_BACK = f"{LOOKED_AT} runs or more are before it in the queue"


@dataclass(frozen=True)
class _Room:
    """Where a pool may be now, or what it waits for and what makes room for it.

    devices: None where there is no room yet.
    waiting: what is in the way.
    idle: pools that are in the way and need only be stopped.
    taken: groups of devices that other daemons hold.
    victims: runs that have to stop.
    claim: what the run keeps for itself from the runs behind it.
    """

    devices: Devices | None = None
    waiting: str = ""
    idle: Sequence[Pool] = ()
    taken: Sequence[Devices] = ()
    victims: Sequence[RunRow] = ()
    claim: Claim | None = None


def place_runs(ctx: Context) -> None:
    """Give each run at the head of the queue a pool, or say what it waits for.

    It is all on disk at once. Requests wait meanwhile: after PLACE_SECONDS the next pass, which comes at
    once, does the rest.
    """
    queue = runs.queue(ctx.store)
    ctx.queue.places, ctx.queue.on_cluster = {}, frozenset()
    first = now = take_snapshot(ctx, queue) if queue else Snapshot()
    claims, until = list[Claim](), time.monotonic() + PLACE_SECONDS

    def place_queued(ctx: Context, run: RunRow) -> None:
        nonlocal now
        if now is not first and time.monotonic() > until:
            ctx.loop.poke()
        else:
            now = _place(ctx, now, run, claims)

    with ctx.store.write() if now.queued else contextlib.nullcontext():
        each(ctx, place_queued, now.queued, of_run)
        for name in (run.name for run in now.far_back if run.waiting != FAR_BACK):
            runs.set_fields(ctx.store, name, waiting=FAR_BACK)
    placed = {run.name for run in now.active}
    order: list[RunRow | QueuedRow] = [*now.queued, *now.far_back]
    ctx.queue.places = places_in(ctx, [run for run in order if run.name not in placed])


def _place(ctx: Context, now: Snapshot, run: RunRow, claims: list[Claim]) -> Snapshot:
    """Begin an attempt of a queued run, end it if no pool can ever take it, or write down what it waits for.

    Its claim is added to those of the runs before it. Returns the snapshot for the runs behind it.
    """
    try:
        waiting = wait_for_restart(ctx, run) or over_limit(ctx, run, now.active)
        if not waiting:
            offers = offers_for(now, run, now.asked_of(run))
            setups = {devices: setup for devices, (setup, _) in offers.items()}
            if never := never_fits(run, setups.values(), now.pools) or _of_others(ctx, run, setups):
                runs.move(ctx.store, run.name, Move.END, reason=EndReason.FAILED, detail=never)
                return now
            room = find_room(now, setups, run, claims)
            if room.devices is not None:
                setup, why = offers[room.devices]
                keep_runtime(ctx, run, setup.threads, why)
                _begin_attempt(ctx, run, find_or_make(ctx, setup))
                return now.with_runs_of(ctx)
            make_way(ctx, now, room, anybody(ctx).name_all([run]))
            claims += [room.claim] if room.claim else []
            waiting = room.waiting
            if room.victims:
                stop_for(ctx, run, room.victims)
                now = now.with_runs_of(ctx)
    except (OSError, msgspec.MsgspecError) as error:
        waiting = f"its files cannot be read: {error}"
    except LoradError as error:
        waiting = error.message
    if waiting and waiting != run.waiting:
        runs.set_fields(ctx.store, run.name, waiting=waiting)
    return now


def _of_others(ctx: Context, run: RunRow, setups: Mapping[Devices, PoolSetup]) -> str:
    """Say why a run that can only be on the cluster may not be there: it is another user's."""
    there = ctx.queue.strangers.get(run.owner_uid)
    if there is None or not all(setup.nodes for setup in setups.values()):
        return ""
    return (
        f"the cluster works as {user_name(there)} (uid {there}), and the run is {run.owner}'s (uid "
        f"{run.owner_uid}): a cluster is for one user alone"
    )


def offers_for(now: Snapshot, run: RunRow, asked: Asked) -> Asked:
    """Fit the setups that a run asks for to existing pools: take a warm pool's threads where only the load
    decides.

    A server may take more than the run needs, if it is that of a warm pool or of the pool that the run had;
    one that has not started gets the ranks and lengths of all runs in the queue that could share it.
    """
    return {devices: _offered(now, run, devices, setup, why) for devices, (setup, why) in asked.items()}


def _offered(
    now: Snapshot, run: RunRow, devices: Devices, setup: PoolSetup, why: Why
) -> tuple[PoolSetup, Why]:
    for pool in now.pools:
        is_warm = pool.stop_asked is None and now.is_used(pool)
        if (is_warm or pool.id == run.pool) and pool.setup.takes(setup):
            return msgspec.structs.replace(setup, server=pool.setup.server).taught_by(pool.setup), why
        free = msgspec.structs.replace(setup, threads=pool.setup.threads)
        if is_warm and why.source == "load" and pool.setup.takes(free):
            warm = msgspec.structs.replace(free, server=pool.setup.server).taught_by(pool.setup)
            return warm, Why("load", f"pool {pool.id} is warm and has as many")
    return setup if setup.server is None else setup.widened(now.widest.get((devices, setup.kind), setup)), why


def find_room(
    now: Snapshot,
    setups: Mapping[Devices, PoolSetup],
    run: RunRow | None = None,
    claims: Sequence[Claim] = (),
) -> _Room:
    """Find the devices that a pool may have now. Warm pools go before free devices.

    run: the one that is to train there; None for a pool that only serves. claims: of the runs before it in
    the queue.
    """
    warm = {pool.setup.key for pool in now.pools if pool.process.is_up}
    found: dict[Devices, Obstacle] = {}
    for devices, setup in sorted(setups.items(), key=lambda item: item[1].key not in warm):
        in_the_way = obstacle(now, setup, devices, run, claims)
        if in_the_way is None:
            return _Room(devices)
        found[devices] = in_the_way
    cleared, victims = (None, []) if run is None else choose_victims(now, run, setups, found)
    return _Room(
        waiting=_in_words(now, found),
        idle=next((obstacle.idle for obstacle in found.values() if obstacle.idle), ()),
        taken=[obstacle.taken for obstacle in found.values() if obstacle.taken],
        victims=victims,
        claim=None if run is None else _claim(run, setups, found, cleared),
    )


def make_way(ctx: Context, now: Snapshot, room: _Room, why: str) -> None:
    """Stop the idle pools that are in the way, unless a pool is leaving already, and ask other daemons for
    their devices: for those of the first group whose holders are all idle, if there is one.
    """
    if not any(pool.is_leaving for pool in now.pools):
        for pool in room.idle:
            stop_pool(ctx, pool)
    idle = [group for group in room.taken if all(now.taken[device.name].is_idle for device in group)]
    for device in (device for group in idle[:1] or room.taken for device in group):
        ctx.gpus.notes.wanted.setdefault(device.uuid, why)


def _claim(
    run: RunRow,
    setups: Mapping[Devices, PoolSetup],
    found: Mapping[Devices, Obstacle],
    cleared: Devices | None,
) -> Claim | None:
    """Choose the devices that a run waits for: those that are being cleared for it, else the first."""
    for devices in [*([cleared] if cleared else []), *found]:
        if (alone := found[devices].claim) is not None:
            pool = setups[devices].key if isinstance(devices[0], Shape) else ""
            return Claim(run, devices, alone, pool)
    return None


def _in_words(now: Snapshot, found: Mapping[Devices, Obstacle]) -> str:
    """Say what is in the way everywhere, and how many of several devices are free, unless all that it asks
    for is on a cluster.
    """
    reasons = "; ".join(dict.fromkeys(part for o in found.values() for part in o.parts or (o.reason,)))
    if len(now.devices) == 1 or all(isinstance(devices[0], Shape) for devices in found):
        return reasons
    return f"{now.count_free()} of {len(now.devices)} devices free; {reasons}"


def starting(pool: Pool, run: str) -> str:
    """Say what a starting run waits for; "" where that takes seconds."""
    setup = pool.setup
    started = {
        "trainer": setup.trainer if setup.ranks is not None else "",
        "engine": setup.engine if setup.server is not None and not setup.server.urls else "",
    }
    if pool.status is not None or not any(started.values()):
        return ""
    if pool.is_waiting:
        return pool.waits_for
    names = " and ".join(name for name in started.values() if name)
    logs = " and ".join(f"`lorad logs {run} --of {of} -f`" for of, name in started.items() if name)
    return (
        f"pool {pool.id} starts {names}: {logs} {'show' if all(started.values()) else 'shows'} how far it is"
    )


def _begin_attempt(ctx: Context, run: RunRow, pool: Pool) -> None:
    """Move the run to starting in `pool`; `launch` starts its processes, as often as it takes."""
    begins_with = run.resume_step
    if begins_with is None:
        begins_with = next((row.step for row in reversed(checkpoints(ctx.store, run.name))), None)
    waiting = starting(pool, run.name)
    runs.place(ctx.store, run.name, pool.id, waiting=waiting, resumed_from=begins_with)
    forecasts.started(ctx.store, run.name, time.time())
    ctx.queue.not_before.pop(run.name, None)
    ctx.queue.passed -= {run.name}
    ctx.queue.on_cluster -= {run.name}
