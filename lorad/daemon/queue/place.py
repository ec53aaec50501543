"""Decide which queued run goes where: by priority, then the owners take turns; a pool takes many runs if it
has room.

A run that finds no room lets others pass that do. But where a run waits for the devices to itself
(`exclusive`, or for another base), no run behind it in the queue is placed there any more, and where one
waits for room, no run of a lower
priority: so a run that waits for others to leave is not passed for ever.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping

import msgspec

from lorad.box.runtime import Why
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.guarded import each, of_run
from lorad.daemon.pool import Pool, setup_for
from lorad.daemon.pools.life import find_or_make, stop_pool
from lorad.daemon.pools.threads import fixed_threads, keep_runtime, runtime_of
from lorad.daemon.pools.watch_gpus import look
from lorad.daemon.queue.capacity import capacity_of, impossible
from lorad.daemon.queue.device_holders import want
from lorad.daemon.queue.limits import over_limit
from lorad.daemon.queue.obstacles import Claim, Devices, Obstacle, count_free, limited, obstacle, passed
from lorad.daemon.queue.preempt import make_room
from lorad.daemon.queue.restart import wait_for_restart
from lorad.daemon.queue.tenants import active_runs, need_of_run, tenants_of
from lorad.errors import LoradError, SpecError
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import Capacity
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.checkpoints import checkpoints
from lorad.store.rows import QueuedRow, RunRow

Asked = dict[Devices, tuple[PoolSetup, Why]]
MOST_ASKED = 4096  # runs
LOOKED_AT = 32  # runs at the head of the queue for which a pass looks for room, so that it stays short
TURN = 8  # runs of one user that may work before those of others that wait
FAR_BACK = f"{LOOKED_AT} runs or more are before it in the queue"


def place_runs(ctx: Context) -> None:
    claims: list[Claim] = []
    queue = in_turn(ctx)
    head = [runs.get(ctx.store, run.name) for run in queue[:LOOKED_AT]]
    ctx.queue.wishes = {}

    def place_queued(ctx: Context, run: RunRow) -> None:
        place_run(ctx, run, claims)

    try:
        each(ctx, place_queued, head, of_run)
    finally:
        ctx.queue.wishes = None
    if far_back := [run.name for run in queue[LOOKED_AT:] if run.waiting != FAR_BACK]:
        with ctx.store.write():
            for name in far_back:
                runs.set_fields(ctx.store, name, waiting=FAR_BACK)


def in_turn(ctx: Context) -> list[QueuedRow]:
    """Sort the queue by priority; then owners take turns of TURN runs each, the longest without one first;
    then by age.

    So no user has to wait until all runs of another user are over.
    """
    queued = runs.queue(ctx.store)
    if len({run.owner_uid for run in queued}) < 2:
        return queued
    ahead, latest = Counter(run.owner_uid for run in active_runs(ctx)), runs.latest_starts(ctx.store)
    turns = []
    for run in queued:
        owner = run.owner_uid
        turns.append((-run.priority, ahead[owner] // TURN, latest.get(owner, 0.0)))
        ahead[owner] += 1
    return [run for _, run in sorted(zip(turns, queued, strict=True), key=lambda item: item[0])]


def place_run(ctx: Context, run: RunRow, claims: list[Claim]) -> None:
    """Give a queued run a pool, or say what it waits for."""
    try:
        waiting = wait_for_restart(ctx, run) or over_limit(ctx, run) or place(ctx, run, claims)
    except (OSError, msgspec.MsgspecError) as error:
        waiting = f"its files cannot be read: {error}"
    except LoradError as error:
        waiting = error.message
    if waiting and waiting != run.waiting:
        runs.set_fields(ctx.store, run.name, waiting=waiting)


def place(ctx: Context, run: RunRow, claims: list[Claim]) -> str:
    """Begin an attempt of `run` in a pool, or end the run if no pool can ever take it; "" when either is
    done.

    Otherwise returns what the run waits for.
    """
    found = setups_of(ctx, run)
    setups = {devices: setup for devices, (setup, _) in found.items()}
    if never := never_fits(ctx, run, setups):
        ctx.move(run.name, Move.END, reason=EndReason.FAILED, detail=never)
        return ""
    devices, waiting = room_for(ctx, setups, run, claims)
    if devices is not None:
        setup, why = found[devices]
        keep_runtime(ctx, run, setup.threads, why)
        begin_attempt(ctx, run, find_or_make(ctx, setup))
    return waiting


def groups(ctx: Context, run: RunRow) -> list[Devices]:
    """List the groups of neighbouring devices that suit a run.

    On the CPU all ranks share one. Raises SpecError.
    """
    count = 1 if ctx.gpus.devices[0].is_cpu else spec_of(run).gpus
    if count > len(ctx.gpus.devices):
        raise SpecError(f"it needs {count} GPUs, this machine has {len(ctx.gpus.devices)}")
    return [
        tuple(ctx.gpus.devices[first : first + count]) for first in range(len(ctx.gpus.devices) - count + 1)
    ]


def setups_of(ctx: Context, run: RunRow) -> Asked:
    """Find the pool that a run gets on each group of devices, and why that many threads. Raises SpecError."""
    return {devices: offered(ctx, run, devices, *asked) for devices, asked in asked_of(ctx, run).items()}


def asked_of(ctx: Context, run: RunRow) -> Asked:
    """Ask `asked_by` for every group of devices; the answer is cached until one of its inputs changes."""
    settings = run.spec, run.owner_uid, request_of(run), fixed_threads(ctx, run)
    made_of = (*settings, ctx.gpus.machine(), ctx.config, *ctx.gpus.devices)
    before, found = ctx.queue.asked.get(run.name, (None, {}))
    if before == made_of:
        return found
    if len(ctx.queue.asked) > MOST_ASKED:
        ctx.queue.asked.clear()
    found = {devices: asked_by(ctx, run, devices) for devices in groups(ctx, run)}
    ctx.queue.asked[run.name] = made_of, found
    return found


def offered(ctx: Context, run: RunRow, devices: Devices, setup: PoolSetup, why: Why) -> tuple[PoolSetup, Why]:
    """Fit the setup that a run asks for to existing pools: take a warm pool's threads where only the load
    decides.

    A server may take more than the run needs, if it is that of a warm pool or of the pool that the run had.
    """
    for pool in ctx.pools.values():
        is_warm = pool.stop_asked is None and (pool.process.is_up or bool(tenants_of(ctx, pool)))
        if pool.setup.takes(setup) and (is_warm or pool.id == run.pool):
            return msgspec.structs.replace(setup, server=pool.setup.server), why
        free = msgspec.structs.replace(setup, threads=pool.setup.threads)
        if is_warm and why.source == "load" and pool.setup.takes(free):
            warm = msgspec.structs.replace(free, server=pool.setup.server)
            return warm, Why("load", f"pool {pool.id} is warm and has as many")
    return for_the_queue(ctx, setup, devices), why


def asked_by(ctx: Context, run: RunRow, devices: Devices) -> tuple[PoolSetup, Why]:
    """Make the setup of the smallest pool that suits the run."""
    request, runtime = request_of(run), runtime_of(ctx, run, devices[0])
    setup = setup_for(
        spec_of(run),
        ctx.config,
        *devices,
        model_path=request.model_path,
        dtype=request.model_dtype,
        threads=runtime.threads,
        facts=request.facts,
        cwd=request.cwd,
    )
    return msgspec.structs.replace(setup, owner=run.owner_uid), runtime.reasons["threads"]


def for_the_queue(ctx: Context, setup: PoolSetup, devices: Devices) -> PoolSetup:
    """Give a server that has not started the ranks and lengths of all runs in the queue that
    could share it.
    """
    if setup.server is None:
        return setup
    known = {} if ctx.queue.wishes is None else ctx.queue.wishes
    if devices not in known:
        known[devices] = wishes_of(ctx, devices)
    return setup.widened(known[devices].get(setup.kind, setup))


def wishes_of(ctx: Context, devices: Devices) -> dict[str, PoolSetup]:
    """Find, for each kind of pool, the widest server that any run near the head of the queue asks for."""
    widest: dict[str, PoolSetup] = {}
    for waiting in in_turn(ctx)[:LOOKED_AT]:
        run = runs.get(ctx.store, waiting.name)
        # the run needs more devices, or fewer
        with contextlib.suppress(msgspec.MsgspecError, LoradError, KeyError):
            asked = asked_of(ctx, run)[devices][0]
            if asked.server is not None:
                widest[asked.kind] = asked.widened(widest.get(asked.kind, asked))
    return widest


def never_fits(ctx: Context, run: RunRow, setups: Mapping[Devices, PoolSetup]) -> str:
    """Say why none of the pools could take the run even if it were empty; "" when one could."""
    reasons = [
        impossible(capacity_by(ctx, setup), need_of_run(run, setup.dtype)) for setup in setups.values()
    ]
    return reasons[0] if all(reasons) else ""


def capacity_by(ctx: Context, setup: PoolSetup) -> Capacity:
    """Read the capacity of the pool that has this setup; without such a pool, take the defaults."""
    told = next((pool.status for pool in ctx.pools.values() if pool.setup.key == setup.key), None)
    return capacity_of(setup.server, told)


def room_for(
    ctx: Context,
    setups: Mapping[Devices, PoolSetup],
    run: RunRow | None = None,
    claims: list[Claim] | None = None,
) -> tuple[Devices | None, str]:
    """The devices that a pool may have now, or None and what it waits for. Warm pools go before free devices.

    Idle pools are stopped where nothing else is in the way, unless one is stopping already; other daemons are
    asked for theirs; runs of lower priority make room. run: the one that is to train there; claims: of those
    before it in the queue, to which its own is added when it waits.
    """
    look(ctx)
    warm = {pool.setup.key for pool in ctx.pools.values() if pool.process.is_up}
    found: dict[Devices, Obstacle] = {}
    for devices, setup in sorted(setups.items(), key=lambda item: item[1].key not in warm):
        barred = passed(devices, run, claims or []) or limited(ctx, setup, devices, run)
        in_the_way = barred or obstacle(ctx, setup, devices, run)
        if in_the_way is None:
            return devices, ""
        found[devices] = in_the_way
    if not any(pool.process.is_up and pool.stop_asked is not None for pool in ctx.pools.values()):
        for pool in next((obstacle.idle for obstacle in found.values() if obstacle.idle), ()):
            stop_pool(ctx, pool)
    want(
        ctx, [obstacle.taken for obstacle in found.values()], f"run {run.name}" if run else "a base to serve"
    )
    if run is not None and claims is not None:
        claim(claims, run, found, make_room(ctx, run, setups, found))
    return None, in_words(ctx, found)


def claim(
    claims: list[Claim], run: RunRow, found: Mapping[Devices, Obstacle], cleared: Devices | None
) -> None:
    """Choose the devices that a run waits for: those that are being cleared for it, else the first."""
    order = ([cleared] if cleared else []) + list(found)
    claimed = next(
        ((devices, found[devices].claim) for devices in order if found[devices].claim is not None), None
    )
    if claimed is not None:
        claims.append(Claim(run.name, run.priority, claimed[0], bool(claimed[1])))


def in_words(ctx: Context, found: Mapping[Devices, Obstacle]) -> str:
    """Say what is in the way everywhere, and how many of several devices are free."""
    reasons = "; ".join(dict.fromkeys(part for o in found.values() for part in o.parts or (o.reason,)))
    if len(ctx.gpus.devices) == 1:
        return reasons
    return f"{count_free(ctx)} of {len(ctx.gpus.devices)} devices free; {reasons}"


def starting(pool: Pool, run: str) -> str:
    """Say what a starting run waits for; "" where that takes seconds."""
    setup = pool.setup
    started = {
        "trainer": setup.trainer if setup.ranks is not None else "",
        "engine": setup.engine if setup.server is not None and not setup.server.urls else "",
    }
    if pool.status is not None or not any(started.values()):
        return ""
    names = " and ".join(name for name in started.values() if name)
    logs = " and ".join(f"`lorad logs {run} --of {of} -f`" for of, name in started.items() if name)
    return (
        f"pool {pool.id} starts {names}: {logs} {'show' if all(started.values()) else 'shows'} how far it is"
    )


def begin_attempt(ctx: Context, run: RunRow, pool: Pool) -> None:
    """Move the run to starting in `pool`; `launch` starts its processes, as often as it takes."""
    name = run.name
    with ctx.store.write():
        newest = [row.step for row in checkpoints(ctx.store, name)][-1:]
        wanted = run.resume_step
        runs.begin_attempt(
            ctx.store, name, resumed_from=next(iter(newest), None) if wanted is None else wanted
        )
        runs.set_fields(ctx.store, name, pool=pool.id, waiting=starting(pool, name))
        ctx.move(name, Move.PLACE, detail=f"pool {pool.id}")
    ctx.queue.not_before.pop(name, None)
