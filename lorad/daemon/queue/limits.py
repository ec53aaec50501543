"""The limits of one user: active runs in all and of a group, bytes on disk, device-hours in a span of time,
and the priority of their runs; `queue/choose.py` has the limit of devices.

A run over a limit waits and says why. It claims nothing: the runs behind it in the queue are placed as if it
were not there.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lorad.box.config import DeviceHours
from lorad.daemon.access import admins, is_admin
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.shares import hours_of
from lorad.daemon.state import bytes_of
from lorad.errors import NotAllowed
from lorad.records.bill import Quota
from lorad.spec.model import Spec
from lorad.store import groups, runs
from lorad.store.bill import HOUR, Hours
from lorad.store.rows import RunRow
from lorad.text import moment, size

_MEASURE_SECONDS = 60.0


def refuse_priority(ctx: Context, caller: Caller, *specs: Spec) -> None:
    """Raise NotAllowed where a user of a shared daemon asks for a higher priority than they may."""
    priority = max(spec.resources.priority for spec in specs)
    most = ctx.config.queue.limit_of(caller.name).priority
    if is_admin(ctx, caller) or priority <= most:
        return
    key = f"queue.users.{caller.name}.priority"
    hint = f"Lower it, or ask an admin ({admins(ctx)}) for more: {key} in config.yaml."
    problem = f"resources.priority is {priority}; {caller.name}'s runs may have {most} at most"
    raise NotAllowed(problem, hint=hint)


def over_limit(ctx: Context, run: RunRow, active: Sequence[RunRow], at: float | None = None) -> str:
    """Say which limit of its user keeps a queued run waiting, wherever it would go; "" when none does.

    What runs take on disk is measured, unless it was done in the last minute or is under way.

    active: the runs of all users that work.
    at: Unix time; None: now.
    """
    user = run.owner
    limit = ctx.config.queue.limit_of(user)
    own_runs = [other for other in active if other.owner_uid == run.owner_uid]
    if run.group and (most := groups.limit_of(ctx.store, run.owner_uid, run.group)) is not None:
        in_group = sum(other.group == run.group for other in own_runs)
        if in_group >= most:
            return f"waits for group {run.group} ({in_group} of {most} running)"
    working = len(own_runs)
    if limit.runs is not None and working >= limit.runs:
        return f"{user} has {working} of {limit.runs} runs working"
    if used_up := over_hours(ctx, user, run.owner_uid, at):
        return used_up
    if limit.disk is None:
        return ""
    disk = ctx.storage.by_owner

    async def measure(directories: dict[int, list[Path]]) -> None:
        try:
            disk.used = {
                uid: await asyncio.to_thread(bytes_of, paths, on_disk=True)
                for uid, paths in directories.items()
            }
        finally:
            disk.at = time.monotonic()
            disk.is_measuring = False
            ctx.loop.poke()

    if not disk.is_measuring and time.monotonic() - disk.at >= _MEASURE_SECONDS:
        disk.is_measuring = True
        ctx.spawn(measure(runs.directories(ctx.store)))
    used = disk.used.get(run.owner_uid)
    if used is None:
        return f"checking how much {user}'s runs take on disk"
    if used < limit.disk:
        return ""
    part = f"{size(used)} of {size(limit.disk)}"
    return f"{user}'s runs take {part} on disk; `lorad gc` and `lorad rm` free some"


def over_hours(ctx: Context, user: str, uid: int, at: float | None = None) -> str:
    """Say that a user has used all the device-hours that they may, and until when; "" when they have not.

    at: Unix time; None: now. What is used from now on is not known, and does not count.
    """
    quota = quota_of(ctx, user, uid, at)
    if quota is None or quota.used < quota.most:
        return ""
    until = "" if quota.again is None else f"; enough again at {moment(quota.again)} at the earliest"
    return f"{user} used {quota.used:.1f} of {quota.most:g} device-hours in {quota.per}{until}"


def quota_of(ctx: Context, user: str, uid: int, at: float | None = None) -> Quota | None:
    """Compute how many of their device-hours a user has used, at Unix time `at`; None without a quota."""
    quota = ctx.config.queue.limit_of(user).device_hours
    if quota is None:
        return None
    now = time.time() if at is None else at
    hours = hours_of(ctx).get(uid, [])
    used = sum(seconds for hour, seconds in hours if hour >= _first(quota, now))
    again = enough_again(hours, quota, now) if used / HOUR >= quota.most else None
    return Quota(user, used / HOUR, quota.most, quota.per, again)


def enough_again(hours: Hours, quota: DeviceHours, now: float) -> float | None:
    """Find the Unix time from which a user is below the quota, if they use nothing until then; None: never.

    An hour of use leaves the span as a whole, when its last second does.
    """
    counted = sorted((hour, seconds) for hour, seconds in hours if hour >= _first(quota, now))
    left = sum(seconds for _, seconds in counted)
    for hour, seconds in counted:
        if left / HOUR < quota.most:
            break
        left = left - seconds
        now = hour + HOUR + quota.seconds
    return now if left / HOUR < quota.most else None


def quotas_of(
    ctx: Context, owners: Mapping[int, str], only_uid: int | None, only_user: str | None
) -> list[Quota]:
    """List how much users have used of their quotas, the greatest part first.

    owners: names of users by uid.
    only_uid, only_user: the one user whose quota is listed, where not all are.
    """
    listed = [(uid, user) for uid, user in owners.items() if only_uid in (None, uid)]
    quotas = [quota_of(ctx, user, uid) for uid, user in listed if only_user in (None, user)]
    present = [quota for quota in quotas if quota is not None]
    return sorted(present, key=lambda quota: (-quota.used / max(quota.most, 1e-9), quota.user))


def _first(quota: DeviceHours, now: float) -> int:
    """Return the first hour of the span that counts."""
    return int(now - quota.seconds) // HOUR * HOUR
