"""Which queued run goes where: priority, then first come first served; one run in a pool at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping

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

Devices = tuple[Device, ...]


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
    found = {devices: setup_of(ctx, run, devices) for devices in groups(ctx, run)}
    devices, waiting = room_for(ctx, {devices: setup for devices, (setup, _) in found.items()})
    if devices is not None:
        setup, why = found[devices]
        keep_runtime(ctx, run, setup.threads, why)
        begin_attempt(ctx, run, find_or_make(ctx, setup))
    return waiting


def groups(ctx: Context, run: Row) -> list[Devices]:
    """Where a run could go: neighbours, as many as it needs. On the CPU all ranks share the one. Raises SpecError."""
    count = 1 if ctx.devices[0].name == "cpu" else spec_of(run).gpus
    if count > len(ctx.devices):
        raise SpecError(f"it needs {count} GPUs, this machine has {len(ctx.devices)}")
    return [tuple(ctx.devices[first : first + count]) for first in range(len(ctx.devices) - count + 1)]


def setup_of(ctx: Context, run: Row, devices: Devices, *, any_threads: bool = False) -> tuple[PoolSetup, Why]:
    """The pool that a run asks for, and why that many threads. A warm pool's are taken where only the load decides.

    any_threads: those of a warm pool in any case, to be served rather than trained.
    """
    request, runtime = request_of(run), runtime_of(ctx, run, devices[0])
    threads, why = runtime.threads, runtime.reasons["threads"]
    setup = setup_for(
        spec_of(run),
        ctx.config,
        *devices,
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


def room_for(ctx: Context, setups: Mapping[Devices, PoolSetup]) -> tuple[Devices | None, str]:
    """The devices that a pool may have now, or None and what it waits for. Warm pools go before free devices.

    Idle pools are stopped where nothing else is in the way, unless one is stopping already.
    """
    warm = {pool.setup.key for pool in ctx.pools.values() if pool.process.is_up}
    reasons: list[str] = []
    idle: list[Pool] = []
    for devices, setup in sorted(setups.items(), key=lambda item: item[1].key not in warm):
        reason, in_the_way = obstacle(ctx, setup, devices)
        if not reason:
            return devices, ""
        reasons.append(reason)
        idle = idle or in_the_way
    if not any(pool.process.is_up and pool.stop_asked is not None for pool in ctx.pools.values()):
        for pool in idle:
            stop_pool(ctx, pool)
    return None, "; ".join(dict.fromkeys(reasons))


def obstacle(ctx: Context, setup: PoolSetup, devices: Devices) -> tuple[str, list[Pool]]:
    """Why a pool of `setup` may not have the devices now, "" when it may; and the pools that need only be stopped."""
    holders = pools_on(ctx, devices)
    for pool in holders:
        if tenant := tenant_of(ctx, pool):
            return f"pool {pool.id} is busy with run {tenant}; starts when it ends", []
        if pool.stop_asked is not None:
            return f"pool {pool.id} on {', '.join(pool.setup.names)} is stopping", []
        if pool.setup.key == setup.key:
            return "", []
        if pool.guests:
            return f"pool {pool.id} on {', '.join(pool.setup.names)} answers a request", []
    if holders:
        names = ", ".join(f"pool {pool.id} on {', '.join(pool.setup.names)}" for pool in holders)
        return f"{names} makes room for another one", holders
    taken = ", ".join(device.name for device in devices if is_taken(device))
    return (f"{taken} is in use by another process or user" if taken else ""), []


def pools_on(ctx: Context, devices: Devices) -> list[Pool]:
    """The pools whose process holds one of the devices."""
    names = {device.name for device in devices}
    here = [pool for pool in ctx.pools.values() if names & set(pool.setup.names)]
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
    setup = pool.setup
    started = {
        "trainer": setup.trainer if setup.ranks is not None else "",
        "engine": setup.engine if setup.server is not None and not setup.server.urls else "",
    }
    if pool.status is not None or not any(started.values()):
        return ""
    names = " and ".join(name for name in started.values() if name)
    logs = " and ".join(f"`lorad logs {run} --of {of} -f`" for of, name in started.items() if name)
    return f"pool {pool.id} starts {names}: {logs} {'show' if all(started.values()) else 'shows'} how far it is"


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
