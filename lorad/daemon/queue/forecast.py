"""Whether a run that does not exist yet would start at once, or what it would wait for. Changes nothing."""

import time
from collections.abc import Sequence

import msgspec

from lorad.client.check_shapes import Start
from lorad.daemon.context import Context
from lorad.daemon.queue.limits import over_limit
from lorad.daemon.queue.obstacles import Claim
from lorad.daemon.queue.place import FAR_BACK, find_room, offers_for
from lorad.daemon.queue.setups import asked_of
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
    now = take_snapshot(ctx, runs.queue(ctx.store))
    before = [*(one.priority for one in now.queued), *(one.priority for one in now.far_back)]
    ahead = sum(priority >= run.priority for priority in before)
    if waiting := over_limit(ctx, run, now.active):
        return Start("waits", waiting, ahead=ahead)
    offers = offers_for(now, run, asked_of(ctx, run))
    setups = {devices: setup for devices, (setup, _) in offers.items()}
    if never := never_fits(run, setups.values(), now.pools):
        return Start("never", never)
    if ahead >= LOOKED_AT:
        return Start("waits", FAR_BACK, ahead=ahead)
    room = find_room(now, setups, run, _claims_before(ctx, now, run))
    if room.devices is None:
        stops = [victim.name for victim in room.victims]
        return Start("waits", room.waiting, stops=stops, ahead=ahead)
    names, key = [device.name for device in room.devices], setups[room.devices].key
    warm = next((pool.id for pool in now.pools if now.is_used(pool) and pool.setup.key == key), "")
    return Start("now", devices=names, pool=warm, ahead=ahead)


def _claims_before(ctx: Context, now: Snapshot, run: RunRow) -> Sequence[Claim]:
    """List what the queued runs before this one keep for themselves, as a pass of placing would find it."""
    claims: list[Claim] = []
    for one in now.queued:
        is_held = over_limit(ctx, one, now.active) or (one.restart_at or 0.0) > time.time()
        if one.priority < run.priority or is_held:
            continue
        try:
            offers = offers_for(now, one, now.asked_of(one))
            room = find_room(now, {devices: setup for devices, (setup, _) in offers.items()}, one, claims)
        except (OSError, msgspec.MsgspecError, LoradError):
            continue  # it waits for its own files, and claims nothing
        claims += [room.claim] if room.claim else []
    return claims
