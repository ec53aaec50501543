"""Device-hours that a user may use in a span of time up to now, and when enough of them are past."""

import time
from collections.abc import Mapping

from lorad.box.config import DeviceHours
from lorad.daemon.context import Context
from lorad.daemon.queue.shares import hours_of
from lorad.records.bill import Quota
from lorad.store.bill import HOUR, Hours
from lorad.text import moment


def over_hours(ctx: Context, user: str, uid: int, at: float | None = None) -> str:
    """Say that a user has used all the device-hours that they may, and until when; "" when they have not.

    at: Unix time; None: now. What is used from now on is not known, and does not count.
    """
    quota = ctx.config.queue.limit_of(user).device_hours
    if quota is None:
        return ""
    now = time.time() if at is None else at
    hours = hours_of(ctx).get(uid, [])
    used = _used(hours, quota, now)
    if used < quota.most * HOUR:
        return ""
    again = enough_again(hours, quota, now)
    until = "" if again is None else f"; enough again at {moment(again)} at the earliest"
    return f"{user} used {used / HOUR:.1f} of {quota.most:g} device-hours in {quota.per}{until}"


def enough_from(ctx: Context, user: str, uid: int, now: float) -> float | None:
    """Find the Unix time from which a user has not used all the device-hours that they may; None: never."""
    quota = ctx.config.queue.limit_of(user).device_hours
    return now if quota is None else enough_again(hours_of(ctx).get(uid, []), quota, now)


def enough_again(hours: Hours, quota: DeviceHours, now: float) -> float | None:
    """Find the Unix time from which a user is below the quota, if they use nothing until then; None: never.

    An hour of use leaves the span as a whole, when its last second does.
    """
    left = _used(hours, quota, now)
    for hour, seconds in sorted(hours):
        if left < quota.most * HOUR:
            break
        if hour >= _first(quota, now):
            left = left - seconds
            now = hour + HOUR + quota.seconds
    return now if left < quota.most * HOUR else None


def quotas_of(
    ctx: Context, owners: Mapping[int, str], only_uid: int | None, only_user: str | None
) -> list[Quota]:
    """List how much users have used of their quotas, the greatest part first.

    owners: names of users by uid.
    only_uid, only_user: the one user whose quota is listed, where not all are.
    """
    now = time.time()
    quotas = []
    for uid, user in owners.items():
        quota = ctx.config.queue.limit_of(user).device_hours
        if quota is None or only_uid not in (None, uid) or only_user not in (None, user):
            continue
        hours = hours_of(ctx).get(uid, [])
        used = _used(hours, quota, now)
        again = enough_again(hours, quota, now) if used >= quota.most * HOUR else None
        quotas.append(Quota(user, used / HOUR, quota.most, quota.per, again))
    return sorted(quotas, key=lambda quota: (-quota.used / max(quota.most, 1e-9), quota.user))


def _first(quota: DeviceHours, now: float) -> int:
    """Return the first hour of the span."""
    return int(now - quota.seconds) // HOUR * HOUR


def _used(hours: Hours, quota: DeviceHours, now: float) -> float:
    return sum(held for hour, held in hours if hour >= _first(quota, now))
