"""Which queued run goes where: priority, then first come first served; one run in a pool at a time."""

from __future__ import annotations

import time

import msgspec

from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.devices import Device, is_taken
from lorad.daemon.pool import Pool, PoolSetup, setup_for
from lorad.daemon.pools import find_or_make, look_at_process, stop_pool
from lorad.daemon.runtime import keep_runtime, runtime_of
from lorad.errors import SpecError
from lorad.runtime import Why
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.checkpoints import checkpoints
from lorad.store.db import Row


def place_runs(ctx: Context) -> None:
    for run in runs.in_states(ctx.store, RunState.QUEUED):
        place_run(ctx, run)


def place_run(ctx: Context, run: Row) -> None:
    """Give a queued run a pool, or say what it waits for."""
    try:
        waiting = wait_for_restart(ctx, run) or place(ctx, run)
    except (OSError, msgspec.MsgspecError) as error:
        waiting = f"its files cannot be read: {error}"
    except SpecError as error:
        waiting = error.message
    if waiting and waiting != run["waiting"]:
        runs.set_fields(ctx.store, run["name"], waiting=waiting)


def wait_for_restart(ctx: Context, run: Row) -> str:
    left = ctx.not_before.get(run["name"], 0.0) - time.monotonic()
    return run["waiting"] or "restarts soon" if left > 0 else ""


def place(ctx: Context, run: Row) -> str:
    """Begin an attempt of `run` in a pool; "" when done, else in words what it waits for."""
    reasons = []
    for device in ctx.devices:
        setup, why = setup_of(ctx, run, device)
        waiting = obstacle(ctx, setup, device)
        if not waiting:
            keep_runtime(ctx, run, setup.threads, why)
            begin_attempt(ctx, run, find_or_make(ctx, setup))
            return ""
        reasons.append(waiting)
    return "; ".join(dict.fromkeys(reasons))


def setup_of(ctx: Context, run: Row, device: Device, *, any_threads: bool = False) -> tuple[PoolSetup, Why]:
    """The pool that a run asks for, and why that many threads. A warm pool's are taken where only the load decides.

    any_threads: those of a warm pool in any case, to be served rather than trained.
    """
    request, runtime = request_of(run), runtime_of(ctx, run, device)
    threads, why = runtime.threads, runtime.reasons["threads"]
    setup = setup_for(
        spec_of(run),
        ctx.config,
        device,
        model_path=request.model_path,
        dtype=request.model_dtype,
        threads=threads,
        facts=request.facts,
        cwd=request.cwd,
    )
    for pool in ctx.pools.values() if any_threads or why.source == "load" else ():
        if pool.process.is_up and pool.stop_asked is None and pool.setup.differs_in_threads(setup):
            warm = msgspec.structs.replace(setup, threads=pool.setup.threads)
            return warm, Why("load", f"pool {pool.id} is warm and has as many")
    return setup, why


def obstacle(ctx: Context, setup: PoolSetup, device: Device) -> str:
    """Why a run may not enter the pool of `setup` on `device` now; an idle pool in its way is stopped."""
    holders = pools_on(ctx, device)
    for pool in holders:
        if tenant := tenant_of(ctx, pool):
            return f"pool {pool.id} is busy with run {tenant}; starts when it ends"
        if pool.stop_asked is not None:
            return f"pool {pool.id} on {device.name} is stopping"
        if pool.setup.key == setup.key:
            return ""
        if pool.guests:
            return f"pool {pool.id} on {device.name} answers a request"
    for pool in holders:
        stop_pool(ctx, pool)
        return f"pool {pool.id} on {device.name} makes room for another one"
    return f"{device.name} is in use by another process or user" if is_taken(device) else ""


def pools_on(ctx: Context, device: Device) -> list[Pool]:
    """The pools whose process holds the device."""
    here = [pool for pool in ctx.pools.values() if pool.setup.device == device.name]
    for pool in here:
        look_at_process(ctx, pool)
    return [pool for pool in here if pool.process.is_up or tenant_of(ctx, pool)]


def tenant_of(ctx: Context, pool: Pool) -> str | None:
    """The run that has the pool."""
    row = ctx.store.row(
        "SELECT name FROM runs WHERE pool = ? AND state IN ('starting', 'running', 'stopping')", (pool.id,)
    )
    return str(row["name"]) if row else None


def starting(pool: Pool, run: str) -> str:
    """What a run waits for while it is starting; "" where that takes seconds."""
    if pool.setup.server is None or pool.setup.server.urls or pool.status is not None:
        return ""
    return f"pool {pool.id} starts {pool.setup.engine}: `lorad logs {run} --of engine -f` shows how far it is"


def begin_attempt(ctx: Context, run: Row, pool: Pool) -> None:
    """The run is starting in `pool`; its processes are started by `launch`, as often as it takes."""
    name = run["name"]
    with ctx.store.write():
        newest = [row["step"] for row in checkpoints(ctx.store, name)][-1:]
        wanted = run["resume_step"]
        runs.begin_attempt(ctx.store, name, resumed_from=next(iter(newest), None) if wanted is None else wanted)
        runs.set_fields(ctx.store, name, pool=pool.id, waiting=starting(pool, name))
        ctx.move(name, Move.PLACE, detail=f"pool {pool.id}")
    ctx.not_before.pop(name, None)
