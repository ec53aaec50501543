"""Whether a run that does not exist yet would start at once, or what it would wait for. Changes nothing."""

import time
from contextlib import suppress
from itertools import takewhile

import msgspec
from msgspec.structs import replace

from lorad.daemon.access import name_for, owner_of
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import NodesShape
from lorad.daemon.queue.choose import Blocked, Hindrance, WaitingRun, choose
from lorad.daemon.queue.place import FAR_BACK
from lorad.daemon.queue.simulate import simulate
from lorad.daemon.queue.snapshot import LOOKED_AT, take_snapshot
from lorad.errors import LoradError
from lorad.records.checks import Start
from lorad.store import runs
from lorad.store.rows import RunRow


def forecast(ctx: Context, run: RunRow) -> Start:
    """Place a run in thought, behind the queued runs that would go before it, and behind what these keep for
    themselves, as a pass of placing would find it. A run that waits for its own files claims nothing.

    run: a row that the database does not have; its directory has a `request.json`.

    Raises SpecError, StorageError.
    """
    now = take_snapshot(ctx, runs.queue(ctx.store), run)
    at = time.time()
    names = [other.name for other in now.queued] + [other.name for other in now.far_back]
    ahead = names.index(run.name)
    claims: list[WaitingRun] = []
    for other in takewhile(lambda queued: queued.name != run.name, now.queued):
        if (other.restart_at or 0.0) > at:
            continue
        with suppress(OSError, msgspec.MsgspecError, LoradError):
            others_choice = choose(ctx, now, other, claims)
            claims += others_choice.claims if isinstance(others_choice, Blocked) else ()
    choice = choose(ctx, now, run, claims)
    if isinstance(choice, Blocked) and Hindrance.NEVER in choice.by:
        return Start("never", choice.why)
    if ahead >= LOOKED_AT and not (isinstance(choice, Blocked) and Hindrance.LIMIT in choice.by):
        return Start("waits", FAR_BACK, ahead=ahead)
    if isinstance(choice, Blocked):
        stops = [owner_of(ctx, run).name(victim) for victim in choice.victims]
        start = Start("waits", choice.why, stops=stops, ahead=ahead)
        if foreseen := simulate(ctx, now, at).get(run.name):
            start = replace(start, starts_at=foreseen.at, after=name_for(ctx, run, foreseen.after))
        return start
    key = choice.setup.key
    warm = next((pool.id for pool in now.pools if now.is_used(pool) and pool.setup.key == key), "")
    is_granted = warm or not isinstance(choice.devices[0], NodesShape)
    why = "" if is_granted else "the cluster grants them"
    return Start("now", why, devices=[device.name for device in choice.devices], pool=warm, ahead=ahead)
