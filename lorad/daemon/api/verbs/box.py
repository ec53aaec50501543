"""Describe and end the daemon, and look at this machine: devices, database, orphans and the bill."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterable

from aiohttp import web
from msgspec.structs import replace

import lorad
from lorad.box.tokens import tokens_trouble
from lorad.daemon.access import (
    Subject,
    admins,
    is_admin,
    must_be_admin,
    must_own,
    of_run,
    reader,
    sees_all,
)
from lorad.daemon.api.call import Call
from lorad.daemon.api.metrics import CONTENT_TYPE, exposition
from lorad.daemon.api.views import of_row
from lorad.daemon.bill.answer import KEYS, bill_of
from lorad.daemon.bill.take_in import take_in_all
from lorad.daemon.context import Context
from lorad.daemon.gpu import devices, lock_notes
from lorad.daemon.gpu.occupancy import Sight
from lorad.daemon.pools.life import end_pools, timeout_of
from lorad.daemon.pools.watch_gpus import look, sight_of_cpu
from lorad.daemon.process.orphans import find_orphans
from lorad.daemon.queue.device_holders import holder_of_pool
from lorad.daemon.queue.forecast import forecasts_lately
from lorad.daemon.queue.set_aside import holder_of, keep_set_aside, lasts, snapshot_of
from lorad.daemon.record.rows_and_disk import take_census
from lorad.daemon.runs.take_in import size_of
from lorad.daemon.services.door import DOOR
from lorad.daemon.services.gateway import GATEWAY, gateway_address
from lorad.daemon.services.service import stop
from lorad.errors import Conflict, NotAllowed, NotFound, SpecError
from lorad.protocol.listener import answers
from lorad.records.bill import Bill
from lorad.records.daemon import Caller, Census, DatabaseSize, Disk, Orphan, Shutdown, Status, StayingPool
from lorad.records.devices import Device, DeviceProcess, DeviceSample, Lease, Reservation
from lorad.records.requests import ReserveRequest, ShutdownRequest
from lorad.store import pools, runs
from lorad.store.rows import ReservationRow
from lorad.text import duration, moment, one_line

_LOOK_SECONDS = 2.0  # for which a look at the GPUs is waited for
_CPU_SECONDS = 0.05  # over which the use of the CPU is measured
_TROUBLES = 20  # how many things that failed and are tried again are listed


async def show_status(ctx: Context, call: Call) -> Status:
    """Describe the daemon and its state."""
    owner = None if is_admin(ctx, call.caller) else call.caller.uid
    disk = None
    with contextlib.suppress(OSError):  # a filesystem that does not answer
        usage = shutil.disk_usage(ctx.runs_root)  # for users other than root
        disk = Disk(usage.free, usage.total)
    return Status(
        pid=os.getpid(),
        version=lorad.__version__,
        home=str(ctx.home.root),
        caller=Caller(call.caller.name, is_admin(ctx, call.caller)),
        shared=ctx.users.shared,
        started_at=ctx.loop.started_at,
        **gateway_address(ctx, call.caller),
        url_trouble=tokens_trouble(ctx.config.gateway) if is_admin(ctx, call.caller) else "",
        runs={str(state): number for state, number in runs.count_by_state(ctx.store).items()},
        troubles=ctx.loop.troubles.lines(owner)[:_TROUBLES],
        disk=disk,
        database=DatabaseSize(ctx.store.schema, size_of(ctx.home.database)),
        forecasts=forecasts_lately(ctx),
    )


async def shutdown(ctx: Context, call: Call) -> Shutdown:
    """End the daemon. Runs, gateway and pools continue unless they are to end as well."""
    body = call.json(ShutdownRequest)
    async with ctx.requests.parting:
        ctx.close()  # from here on nothing starts another pool
        serves = answers(ctx.home.gateway_socket) and not body.gateway
        stopped = body.gateway and await stop(ctx, GATEWAY)
        up = [pool for pool in ctx.pools.values() if pool.process.is_up]
        if body.pools:
            await end_pools(ctx, [pool for pool in up if not runs.active_in(ctx.store, pool.id)])
        staying = []
        for pool in (pool for pool in up if pool.process.is_up):
            tenants = [run.name for run in runs.active_in(ctx.store, pool.id)]
            aliases = pool.status.kept if pool.status and serves else []
            idle = 0.0 if tenants else pool.idle_seconds
            staying.append(StayingPool(pool.id, tenants, aliases, max(0.0, timeout_of(ctx, pool) - idle)))
        ended = [pool.id for pool in up if not pool.process.is_up]
        if body.gateway or (body.pools and not staying):
            await stop(ctx, DOOR)
        if body.pools and not staying and not stopped:  # nothing is left that it could serve
            stopped = await stop(ctx, GATEWAY)
        return Shutdown(os.getpid(), stopped, ended, staying)


async def list_devices(ctx: Context, call: Call) -> list[Device]:
    """List the devices of this machine, who holds and who uses them; then the devices of nodes."""
    look(ctx)
    if ctx.gpus.sights.since is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ctx.gpus.sights.done.wait(), _LOOK_SECONDS)
    cpu = await asyncio.to_thread(sight_of_cpu, _CPU_SECONDS) if ctx.gpus.devices[0].is_cpu else None
    past = ctx.gpus.history.samples if call.number("history", 0) else {}
    own = [_device_view(ctx, call, device, cpu, past.get(device.name, ())) for device in ctx.gpus.devices]
    on_nodes = []  # nobody measures these here
    for pool in ctx.pools.values():
        if pool.nodes and pool.process.is_up:
            holder = holder_of_pool(ctx, pool, reader(ctx, call.caller))
            lease = of_row(Lease, holder, pool=holder.pool or None, free_after=holder.idle_timeout)
            on_nodes += [Device(name, pool=lease.pool, lease=lease) for name in pool.holds]
    return own + sorted(on_nodes, key=lambda device: device.device)


def _device_view(
    ctx: Context,
    call: Call,
    device: devices.Device,
    cpu: Sight | None = None,
    past: Iterable[DeviceSample] = (),
) -> Device:
    """Describe a device as the caller may see it.

    cpu: what was measured just now of a machine without GPUs.
    past: samples of the last hour.
    """
    sight = cpu or ctx.gpus.sights.seen.get(device.uuid, Sight(0.0))
    who = reader(ctx, call.caller)
    up = [pool for pool in ctx.pools.values() if pool.process.is_up and device.name in pool.names]
    own_pools = [pool for pool in up if who.sees(pool.setup.owner)]
    setup = own_pools[0].setup if own_pools else None
    part = ""  # of the pool, if it is split
    if setup is not None and setup.rollout_devices:
        part = "servers" if device.name in setup.server_names else "trainer"
    holder = holder_of_pool(ctx, up[0], who) if up else lock_notes.holder_of(device)
    lease = None
    if holder is not None:
        lease = of_row(Lease, holder, pool=holder.pool or None, free_after=holder.idle_timeout)
    programs = [DeviceProcess(use.pid, use.user, use.name, use.memory, use.ours) for use in sight.processes]
    aside = ctx.gpus.set_aside.get(device.name)
    reservation = None
    if (row := _reservation_of(ctx, device)) is not None:
        present = holder_of(ctx, device, who) if row.began_at is None else ""
        reservation = of_row(Reservation, row, user=row.owner, since=row.began_at, holder=present)
    return Device(
        device=device.name,
        name=device.label,
        memory_total=device.memory_total,
        memory_used=sight.memory_used,
        utilization=sight.utilization,
        pool=own_pools[0].id if own_pools else None,
        part=part,
        lease=lease,
        processes=programs,
        quiet_until=aside.quiet_until if aside else None,
        reservation=reservation,
        power=sight.power,
        temperature=sight.temperature,
        history=[*past],
    )


async def reserve_device(ctx: Context, call: Call) -> Device:
    """Keep a device from lorad, from when it is free. Who reserved it may do so anew, by default for the time
    that it has.

    Raises NotFound, SpecError for a time that is over, Conflict where somebody else reserved it, and
    NotAllowed for a longer time than a user may have, or where runs of others would have to stop.
    """
    body = call.json(ReserveRequest)
    device = _find_device(ctx, call)
    caller = call.caller
    now = ctx.queue.clock()
    if body.until is not None and (body.until <= now or body.seconds is not None):
        hint = "Give a time to come, or how long from when the device is free; not both."
        raise SpecError(f"{device.name} cannot be reserved until {moment(body.until)}", hint=hint)
    before = _reservation_of(ctx, device)
    if before is not None and before.owner_uid != caller.uid:
        hint = f"Ask {before.owner}, or wait."
        raise Conflict(f"{device.name} is reserved by {before.owner}{lasts(before)}", hint=hint)
    if body.now:
        snapshot = snapshot_of(ctx)
        tenants = [run for pool in snapshot.pools_on((device,)) for run in snapshot.tenants_of(pool)]
        must_own(ctx, caller, *(of_run(ctx, caller, run) for run in tenants))
    why = one_line(body.why)
    if before is not None and body.seconds is None and body.until is None:
        row = replace(before, urgent=body.now, why=why or before.why)
    else:
        seconds = body.until - now if body.until is not None else body.seconds
        most = ctx.config.queue.limit_of(caller.name).reserve
        if most is not None and (seconds is None or seconds > most) and not is_admin(ctx, caller):
            length = "for ever" if seconds is None else f"for {duration(seconds)}"
            hint = f"Give --for, {duration(most)} at most, or ask an admin ({admins(ctx)})"
            hint += ": queue.limits.reserve."
            raise NotAllowed(f"{caller.name} may not reserve a device {length}", hint=hint)
        row = ReservationRow(
            device=device.key,
            owner=caller.name,
            owner_uid=caller.uid,
            why=why,
            made_at=now,
            seconds=body.seconds,
            until=body.until,
            urgent=body.now,
        )
    pools.reserve(ctx.store, row, device.name)
    keep_set_aside(ctx)
    ctx.loop.poke()
    return _device_view(ctx, call, device)


async def release_device(ctx: Context, call: Call) -> Device:
    """Let lorad use a device again. Raises NotFound, Conflict where nobody reserved it, and NotAllowed."""
    device = _find_device(ctx, call)
    row = _reservation_of(ctx, device)
    if row is None:
        raise Conflict(f"{device.name} is not reserved", hint="`lorad devices` shows what is.")
    must_own(ctx, call.caller, Subject(f"the reservation of {device.name}", row.owner_uid))
    pools.release(ctx.store, row.device, device.name, by=call.caller.name)
    keep_set_aside(ctx)
    ctx.loop.poke()
    return _device_view(ctx, call, device)


def _find_device(ctx: Context, call: Call) -> devices.Device:
    """Find a device by its name, its number or its UUID. Raises NotFound."""
    name = call.request.match_info["device"]
    for device in ctx.gpus.devices:
        if name in (device.name, device.key, device.name.removeprefix("cuda:")):
            return device
    names = ", ".join(device.name for device in ctx.gpus.devices)
    raise NotFound(f"this machine has no device {name}", hint=f"It has {names}.")


def _reservation_of(ctx: Context, device: devices.Device) -> ReservationRow | None:
    return next((row for row in pools.reservations(ctx.store) if row.device == device.key), None)


async def check_database(ctx: Context, call: Call) -> Census:
    """Check whether the database is whole, and whether the files that it names are on disk."""
    return await asyncio.to_thread(take_census, ctx.home, ctx.runs_root)


async def list_orphans(ctx: Context, call: Call) -> list[Orphan]:
    """List the processes of this home that no attempt accounts for."""
    return await asyncio.to_thread(find_orphans, ctx.home)


async def show_metrics(ctx: Context, call: Call) -> web.Response:
    """Answer what Prometheus reads, see `lorad/daemon/api/metrics.py`. Raises NotAllowed for users who do not
    see the runs of others, as the figures are sums over all.
    """
    if not sees_all(ctx, call.caller):
        must_be_admin(ctx, call.caller)
    return web.Response(text=await exposition(ctx), headers={"Content-Type": CONTENT_TYPE})


async def show_bill(ctx: Context, call: Call) -> Bill:
    """Add up what was used, with what pools wrote up to now. Raises SpecError."""
    by = next((key for key in KEYS if key == (call.text("by") or "run")), None)
    if by is None:
        raise SpecError(f"a bill by {call.text('by')}", hint=f"It is by one of: {', '.join(KEYS)}.")
    times = {key: call.number(key, -1) for key in ("since", "until")}
    period: dict[str, float] = {key: at for key, at in times.items() if at >= 0}
    await take_in_all(ctx)
    return await bill_of(ctx, call.caller, by, user=call.text("user"), **period)
