"""Decide which queued run goes where: by priority, then whose owner used the least lately; a pool takes many
runs if it has room. Requests that need a pool go before all runs.

A run that finds no room lets others pass that do. But where a run waits for the devices to itself
(`exclusive`, or for another base), no run behind it in the queue is placed there any more, and where one
waits for room, no run of a lower priority: so a run that waits for others to leave is not passed for ever.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec

from lorad.daemon.access import EVERYTHING, anybody, owner_of
from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each, of_run
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import find_or_make, look_at_process, start_pool, stop_pool
from lorad.daemon.pools.threads import keep_runtime
from lorad.daemon.queue.choose import Blocked, Hindrance, WaitingRun, choose, choose_devices, fitted
from lorad.daemon.queue.restart import wait_for_restart
from lorad.daemon.queue.setups import Placement, candidates, setup_of
from lorad.daemon.queue.shares import places_in
from lorad.daemon.queue.snapshot import LOOKED_AT, Snapshot, take_snapshot
from lorad.errors import Conflict, LoradError
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.checkpoints import checkpoints
from lorad.store.rows import QueuedRow, RunRow

log = logging.getLogger("lorad.daemon")

PLACE_SECONDS = 0.02  # in one pass, once a run was placed
FAR_BACK = f"{LOOKED_AT} runs or more are before it in the queue"
_BUSY = "Ask again when that is over; `lorad wait RUN` waits for its end, `lorad pause RUN` interrupts it."


def warm_pool(ctx: Context, run: RunRow) -> Pool | None:
    """Find a pool that is up and can serve versions of the run. Raises SpecError, StorageError."""
    base = setup_of(ctx, run)
    for pool in ctx.pools.values():
        if pool.setup.serves(base):
            with contextlib.suppress(OSError):  # else it stays as it was seen last
                look_at_process(ctx, pool)
            if pool.process.is_up and pool.stop_asked is None:
                return pool
    return None


def pool_for(ctx: Context, run: RunRow) -> Pool:
    """Find the pool of the run's base, and start it unless it is up; a pool that trains serves as well.

    Raises Conflict where no device is free, SpecError, StorageError.
    """
    if pool := warm_pool(ctx, run):
        return pool
    now = take_snapshot(ctx, runs.queue(ctx.store))
    untaught = [place._replace(setup=place.setup.taught_by(None)) for place in candidates(ctx, run)]
    choice = choose_devices(now, [fitted(now, run, place) for place in untaught])
    if isinstance(choice, Blocked):
        _make_way(ctx, now, choice, "a base to serve")
        raise Conflict(f"no device is free for {spec_of(run).model.path}: {choice.why}", hint=_BUSY)
    pool = find_or_make(ctx, choice.setup)
    start_pool(ctx, pool)
    return pool


def place_requests(ctx: Context) -> None:
    """Give each request that waits a pool of its base, or refuse it where no device is free.

    It waits on while a pool is leaving, or while somebody looks at who computes on the GPUs.
    """
    for request in [request for request in ctx.queue.requests if not request.pool.done()]:
        try:
            pool = pool_for(ctx, request.run)
            pool.guests += 1  # at once, or a run behind it would have the pool stopped as an idle one
            request.pool.set_result(pool.id)
        except Exception as error:  # which is the trouble of this request alone
            changes = ctx.gpus.sights.since is not None
            changes = changes or any(pool.is_leaving for pool in ctx.pools.values())
            if not (isinstance(error, Conflict) and changes and time.monotonic() < request.until):
                request.pool.set_exception(error)


def place_runs(ctx: Context) -> None:
    """Give each run at the head of the queue a pool, or say what it waits for; all in one transaction.

    As requests wait meanwhile, the next pass, which comes at once, does what is left after PLACE_SECONDS.
    """
    queue = runs.queue(ctx.store)
    ctx.queue.places = {}
    ctx.queue.on_cluster = frozenset()
    first = now = take_snapshot(ctx, queue) if queue else Snapshot()
    claims = list[WaitingRun]()
    until = time.monotonic() + PLACE_SECONDS

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


def _place(ctx: Context, now: Snapshot, run: RunRow, claims: list[WaitingRun]) -> Snapshot:
    """Begin an attempt of a queued run, end it if no pool can ever take it, or write down what it waits for.

    `launch` starts the processes of an attempt. The run's claim is added to `claims`, those of the runs
    before it. Returns the snapshot for the runs behind it.
    """
    try:
        waiting = wait_for_restart(ctx, run)
        if not waiting:
            choice = choose(ctx, now, run, claims)
            if isinstance(choice, Placement):
                keep_runtime(ctx, run, choice.setup.threads, choice.why)
                pool = find_or_make(ctx, choice.setup)
                step = run.resume_step
                if step is None and (saved := checkpoints(ctx.store, run.name)):
                    step = saved[-1].step
                waiting = starting(pool, run.name)
                runs.place(ctx.store, run.name, pool.id, waiting=waiting, resumed_from=step)
                ctx.queue.not_before.pop(run.name, None)
                ctx.queue.passed -= {run.name}
                ctx.queue.on_cluster -= {run.name}
                return now.with_runs_of(ctx)
            if Hindrance.NEVER in choice.by:
                runs.move(ctx.store, run.name, Move.END, reason=EndReason.FAILED, detail=choice.why)
                return now
            _make_way(ctx, now, choice, anybody(ctx).name_all([run]))
            claims += choice.claims
            waiting = choice.why
            if choice.victims:
                stop_for(ctx, run, choice.victims)
                now = now.with_runs_of(ctx)
    except (OSError, msgspec.MsgspecError) as error:
        waiting = f"its files cannot be read: {error}"
    except LoradError as error:
        waiting = error.message
    if waiting and waiting != run.waiting:
        runs.set_fields(ctx.store, run.name, waiting=waiting)
    return now


def _make_way(ctx: Context, now: Snapshot, blocked: Blocked, why: str) -> None:
    """Stop the idle pools that are in the way, unless a pool is leaving already, and ask other daemons for
    their devices: for those of the first group whose holders are all idle, if there is one.
    """
    if not any(pool.is_leaving for pool in now.pools):
        for pool in blocked.idle:
            stop_pool(ctx, pool)
    idle = [group for group in blocked.taken if all(now.taken[device.name].is_idle for device in group)]
    for device in (device for group in idle[:1] or blocked.taken for device in group):
        ctx.gpus.notes.wanted.setdefault(device.uuid, why)


def stop_for(ctx: Context, run: RunRow, victims: Sequence[RunRow]) -> None:
    """Ask runs to pause, so that `run` has room; `restart.py` queues them again."""
    log.info("run %s: preempts %s", run.name, EVERYTHING.name_all(victims))
    with ctx.store.write():
        for victim in victims:
            wish = {"wanted": "pause", "preempted": run.name}
            why = f"preempted by {owner_of(ctx, victim).name(run)}"
            runs.move(ctx.store, victim.name, Move.STOP, detail=why, also=wish)
    ctx.loop.poke()  # runs that wait say so in the next pass


def starting(pool: Pool, run: str) -> str:
    """Say what a starting run waits for; "" where that takes seconds."""
    setup = pool.setup
    engine = setup.engine if setup.server is not None and not setup.server.urls else ""
    started = {"trainer": setup.trainer if setup.has_ranks else "", "engine": engine}
    if pool.status is not None or not any(started.values()):
        return ""
    if pool.is_waiting:
        return pool.waits_for
    names = " and ".join(name for name in started.values() if name)
    logs = " and ".join(f"`lorad logs {run} --of {of} -f`" for of, name in started.items() if name)
    show = "show" if all(started.values()) else "shows"
    return f"pool {pool.id} starts {names}: {logs} {show} how far it is"
