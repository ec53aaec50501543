"""What users have used of the devices lately, which orders the queue; and where each run stands in it.

All of it is in the rows of the bill, so a new daemon finds the same. They are a minute behind at most.
"""

import time
from collections.abc import Mapping, Sequence

from lorad.daemon.context import Context
from lorad.records.runs import Queued
from lorad.store.bill import HALF_LIVES, HOUR, Hours, decayed, hours_of_users
from lorad.store.rows import QueuedRow, RunRow


def used_lately(ctx: Context) -> Mapping[int, float]:
    """Compute the device-seconds of each user by uid, decayed by `queue.half_life`; none without one."""
    half_life = ctx.config.queue.half_life
    if not half_life:
        return {}
    now = time.time()
    return {uid: decayed(hours, half_life, now) for uid, hours in hours_of(ctx).items()}


def hours_of(ctx: Context) -> Mapping[int, Hours]:
    """Find the device-seconds of each user by the hour, as far back as they matter.

    They are read again when a pool has reported something, and once a minute.
    """
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
    """Say where each of these runs stands, which wait in this order, and why those before it come first."""
    used = used_lately(ctx) if len({run.owner_uid for run in waiting}) > 1 else {}
    places: dict[str, Queued] = {}
    other: RunRow | QueuedRow | None = None  # the last run before it that is another user's
    for place, run in enumerate(waiting, 1):
        before = waiting[place - 2] if place > 1 else run
        if before.owner_uid != run.owner_uid:
            other = before
        places[run.name] = Queued(place, len(waiting), _behind(ctx, run, before, other, used))
    return places


def _behind(
    ctx: Context,
    run: RunRow | QueuedRow,
    before: RunRow | QueuedRow,
    other: RunRow | QueuedRow | None,
    used: Mapping[int, float],
) -> str:
    """Say why `before` and `other` come before a run; "" where none but older runs of its user do."""
    if before.priority > run.priority:
        return f"runs of priority {before.priority} come before those of {run.priority}"
    if other is None or other.priority > run.priority or ctx.config.sharing.read != "all":
        return ""
    others_use = used.get(other.owner_uid, 0.0)
    own_use = used.get(run.owner_uid, 0.0)
    if int(others_use // 60) >= int(own_use // 60):
        return f"{other.owner} and {run.owner} take turns"
    return f"{other.owner} used {_hours(others_use)} device-hours lately, {run.owner} {_hours(own_use)}"


def _hours(seconds: float) -> str:
    hours = seconds / HOUR
    return f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"
