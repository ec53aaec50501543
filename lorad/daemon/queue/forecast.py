"""Whether a run that does not exist yet would start at once, or what it would wait for. Changes nothing."""

import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from lorad.client.check_shapes import Start
from lorad.daemon.access import name_for, owner_of
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Shape
from lorad.daemon.queue.limits import over_limit
from lorad.daemon.queue.obstacles import Claim
from lorad.daemon.queue.place import FAR_BACK, find_room, offers_for
from lorad.daemon.queue.setups import asked_of
from lorad.daemon.queue.simulate import simulate
from lorad.daemon.queue.snapshot import LOOKED_AT, Snapshot, take_snapshot
from lorad.daemon.queue.tenants import never_fits
from lorad.errors import LoradError
from lorad.store import runs
from lorad.store.rows import RunRow


def forecast(ctx: Context, run: RunRow) -> Start:
    """Place a run in thought, behind the queued runs that would go before it.

    run: a row that the database does not have; its directory has a `request.json`.

    Raises SpecError, StorageError.
    """
    now, at = take_snapshot(ctx, runs.queue(ctx.store), run), time.time()
    names = [one.name for one in now.queued] + [one.name for one in now.far_back]
    ahead = names.index(run.name)
    if waiting := over_limit(ctx, run, now.active):
        return _waits(ctx, now, run, at, Start("waits", waiting, ahead=ahead))
    offers = offers_for(now, run, asked_of(ctx, run))
    setups = {devices: setup for devices, (setup, _) in offers.items()}
    if never := never_fits(run, setups.values(), now.pools):
        return Start("never", never)
    if ahead >= LOOKED_AT:
        return Start("waits", FAR_BACK, ahead=ahead)
    room = find_room(now, setups, run, _claims_before(ctx, now, run))
    if room.devices is None:
        stops = [owner_of(ctx, run).name(victim) for victim in room.victims]
        return _waits(ctx, now, run, at, Start("waits", room.waiting, stops=stops, ahead=ahead))
    devices, key = [device.name for device in room.devices], setups[room.devices].key
    warm = next((pool.id for pool in now.pools if now.is_used(pool) and pool.setup.key == key), "")
    is_granted = warm or not isinstance(room.devices[0], Shape)
    why = "" if is_granted else "the cluster grants them"
    return Start("now", why, devices=devices, pool=warm, ahead=ahead)


def _waits(ctx: Context, now: Snapshot, run: RunRow, at: float, start: Start) -> Start:
    """Add when a run that would wait starts, where that can be known. at: the Unix time of the snapshot."""
    found = simulate(ctx, now, at).get(run.name)
    return (
        start if found is None else replace(start, starts_at=found.at, after=name_for(ctx, run, found.after))
    )


def _claims_before(ctx: Context, now: Snapshot, run: RunRow) -> Sequence[Claim]:
    """List what the queued runs before this one keep for themselves, as a pass of placing would find it."""
    claims: list[Claim] = []
    for one in now.queued:
        if one.name == run.name:
            break
        if over_limit(ctx, one, now.active) or (one.restart_at or 0.0) > time.time():
            continue
        try:
            offers = offers_for(now, one, now.asked_of(one))
            room = find_room(now, {devices: setup for devices, (setup, _) in offers.items()}, one, claims)
        except (OSError, msgspec.MsgspecError, LoradError):
            continue  # it waits for its own files, and claims nothing
        claims += [room.claim] if room.claim else []
    return claims
