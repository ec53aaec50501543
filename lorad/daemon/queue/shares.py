"""Order the queue by what users have used of the devices lately, and say where each run stands in it.

The use is read from the rows of the bill, so a new daemon finds the same. They are a minute behind at most.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from lorad.daemon.context import Context
from lorad.records.runs import Queued
from lorad.store import runs
from lorad.store.bill import HALF_LIVES, HOUR, Hours, decayed, hours_of_users
from lorad.store.rows import QueuedRow, RunRow

TURN = 8  # runs of one user that may work before those of others that wait


def in_order(ctx: Context, queued: Sequence[QueuedRow], active: Sequence[RunRow]) -> Sequence[QueuedRow]:
    """Sort the queue by priority, then the owner who used the least lately first, to the minute.

    Owners who used equally much take turns of TURN runs each, the longest without one first; then age counts.
    So no user has to wait until all runs of another user are over.
    """
    latest = runs.latest_starts(ctx.store)  # when each owner's newest attempt began
    used = _used_lately(ctx)
    ahead = Counter(run.owner_uid for run in active)
    turns = []
    for run in queued:
        owner = run.owner_uid
        minutes = int(used.get(owner, 0.0) // 60)
        turns.append((-run.priority, minutes, ahead[owner] // TURN, latest.get(owner, 0.0)))
        ahead[owner] += 1
    return [run for _, run in sorted(zip(turns, queued, strict=True), key=lambda item: item[0])]


def _used_lately(ctx: Context) -> Mapping[int, float]:
    """Compute the device-seconds of each user by uid, decayed by `queue.half_life`; none without one."""
    half_life = ctx.config.queue.half_life
    if not half_life:
        return {}
    now = time.time()
    return {uid: decayed(hours, half_life, now) for uid, hours in hours_of(ctx).items()}


def hours_of(ctx: Context) -> Mapping[int, Hours]:
    """Find the device-seconds of each user by the hour; read again after new reports, and once a minute."""
    now = time.time()
    state = ctx.bill.taken, int(now // 60)
    if ctx.queue.hours[0] != state:
        queue = ctx.config.queue
        quotas = [limit.device_hours for limit in (queue.limits, *queue.users.values())]
        spans = [quota.seconds for quota in quotas if quota is not None]
        back = max([HALF_LIVES * (queue.half_life or 0.0), *spans])
        ctx.queue.hours = state, hours_of_users(ctx.store, now - back, strange=ctx.users.shared)
    return ctx.queue.hours[1]


def places_in(ctx: Context, waiting: Sequence[RunRow | QueuedRow]) -> dict[str, Queued]:
    """Say where each run of the queue stands, and why others come before it; "" where they are only older."""
    used = _used_lately(ctx) if len({run.owner_uid for run in waiting}) > 1 else {}
    places: dict[str, Queued] = {}
    other: RunRow | QueuedRow | None = None  # the last run before it that is another user's
    for place, run in enumerate(waiting, 1):
        before = waiting[place - 2] if place > 1 else run
        if before.owner_uid != run.owner_uid:
            other = before
        why = ""
        if before.priority > run.priority:
            why = f"runs of priority {before.priority} come before those of {run.priority}"
        elif other is not None and other.priority <= run.priority and ctx.config.sharing.read == "all":
            theirs = used.get(other.owner_uid, 0.0)
            own = used.get(run.owner_uid, 0.0)
            hours = [f"{s / HOUR:.1f}" if s >= HOUR else f"{s / HOUR:.2f}" for s in (theirs, own)]
            why = f"{other.owner} used {hours[0]} device-hours lately, {run.owner} {hours[1]}"
            if int(theirs // 60) >= int(own // 60):
                why = f"{other.owner} and {run.owner} take turns"
        places[run.name] = Queued(place, len(waiting), why)
    return places
