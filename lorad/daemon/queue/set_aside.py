"""Devices that are set aside: users reserved them for work without lorad, or they have quiet hours.

A reservation begins when nothing of lorad is on its device any more. Until then runs that are there finish,
or stop at their next step where it is urgent; no other run is placed there from the start.
"""

import logging

from msgspec.structs import replace

from lorad.box.quiet import parse, quiet_until
from lorad.daemon.access import Reader
from lorad.daemon.context import Context
from lorad.daemon.gpu import lock_notes
from lorad.daemon.gpu.devices import Device, is_taken
from lorad.daemon.gpu.state import SetAside
from lorad.daemon.guarded import each, of_run
from lorad.daemon.queue.device_holders import held_in_words, holder_of_pool
from lorad.daemon.queue.neighbours import must_yield
from lorad.daemon.queue.snapshot import Snapshot
from lorad.errors import SpecError
from lorad.states import Move, RunState
from lorad.store import pools, runs
from lorad.store.rows import ReservationRow, RunRow
from lorad.text import duration, moment

log = logging.getLogger("lorad.daemon")


def keep_set_aside(ctx: Context) -> None:
    """Begin the reservations whose devices are free, end those whose time is over, and note the others and
    the quiet hours of devices.

    Raises SpecError where config.yaml names devices that this machine does not have.
    """
    queue = ctx.config.queue
    devices = {device.key: device for device in ctx.gpus.devices}
    names = [device.name for device in ctx.gpus.devices]
    now = ctx.queue.clock()
    asides: dict[str, SetAside] = {}
    if (quiet_to := quiet_until([parse(text) for text in queue.quiet_hours], now)) is not None:
        for name in (name for name in names if not queue.quiet_devices or name in queue.quiet_devices):
            why = f"{name} is quiet until {moment(quiet_to, now)} (queue.quiet_hours)"
            asides[name] = SetAside(why, why, urgent=True, reserved=False, quiet_until=quiet_to)
    for row in pools.reservations(ctx.store):
        device = devices.get(row.device)
        if row.until is not None and row.until <= now:
            name = device.name if device else row.device
            pools.release(ctx.store, row.device, name, by="daemon")
            ctx.loop.poke()
        elif device is not None:
            if row.began_at is None and not (snapshot_of(ctx).pools_on((device,)) or is_taken(device)):
                until = row.until if row.seconds is None else now + row.seconds
                pools.begin_reservation(ctx.store, row.device, now, until)
                row = replace(row, began_at=now, until=until)
            about = f" ({row.why})" if row.why else ""
            why = f"{device.name} is reserved by {row.owner}{lasts(row)}{about}"
            says = f"{why}; `lorad devices release {device.name}` gives it back"
            aside = SetAside(why, says, urgent=row.urgent)
            if quiet := asides.get(device.name):
                why = why if row.urgent else quiet.why
                aside = SetAside(why, f"{says}; {quiet.says}", urgent=True, quiet_until=quiet.quiet_until)
            asides[device.name] = aside
    ctx.gpus.set_aside = asides
    if strange := [name for name in queue.quiet_devices if name not in names]:
        hint = f"It has {', '.join(sorted(names))}. Correct config.yaml, then `lorad daemon restart`."
        raise SpecError(f"queue.quiet_devices: this machine has no {', '.join(strange)}", hint=hint)


def lasts(row: ReservationRow) -> str:
    """Say how long a reservation lasts: ` until 14:05`, ` for 2h00m from when it is free`; "" for ever."""
    if row.until is not None:
        return f" until {moment(row.until)}"
    if row.began_at is None:
        length = "" if row.seconds is None else f" for {duration(row.seconds)}"
        return f"{length} from when it is free"
    return ""


def holder_of(ctx: Context, device: Device, reader: Reader) -> str:
    """Say who keeps a reservation from beginning, as the reader may see it; "" when nobody does."""
    users = snapshot_of(ctx).pools_on((device,))
    if not users and not is_taken(device):
        return ""
    if starting := next((pool for pool in users if not pool.process.is_up), None):
        return f"{reader.name_pool(starting)} starts there"
    if pool := next((pool for pool in users if device.name in pool.names), None):
        return f"{reader.name_pool(pool)} is there: {holder_of_pool(ctx, pool, reader).why}"
    return held_in_words(device, lock_notes.holder_of(device))


def snapshot_of(ctx: Context) -> Snapshot:
    """Return the runs and pools on the devices of this machine."""
    return Snapshot(devices=tuple(ctx.gpus.devices)).with_runs_of(ctx)


def give_way(ctx: Context) -> None:
    """Have runs stop at their next step where a device is set aside at once, or they yield to a neighbour."""
    if not ctx.gpus.neighbours and not any(aside.urgent for aside in ctx.gpus.set_aside.values()):
        return
    each(ctx, _give_way, runs.in_states(ctx.store, RunState.STARTING, RunState.RUNNING), of_run)


def _give_way(ctx: Context, run: RunRow) -> None:
    pool = ctx.pools.get(run.pool or "")
    if pool is None:
        return
    asides = [ctx.gpus.set_aside[name] for name in pool.names if name in ctx.gpus.set_aside]
    why = next((aside.why for aside in asides if aside.urgent), "")
    if why := why or must_yield(ctx, run, pool):
        log.info("run %s: gives way, %s", run.name, why)
        wish = {"wanted": "pause", "yielded": why}
        runs.move(ctx.store, run.name, Move.STOP, detail=why, also=wish)
        ctx.loop.poke()
