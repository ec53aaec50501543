"""What one user may have: active runs, in all and of a group, bytes on disk, device-hours in a span of time;
and the priority that they may ask for.

A run over a limit waits and says why; `queue/obstacles.py` has the limit of devices.

It claims nothing: the runs behind it in the queue are placed as if it were not there.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from lorad.daemon.access import admins, is_admin
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.quotas import over_hours
from lorad.daemon.state import bytes_of
from lorad.errors import NotAllowed
from lorad.spec.model import Spec
from lorad.store import groups, runs
from lorad.store.rows import RunRow
from lorad.text import size

_MEASURE_SECONDS = 60.0


def refuse_priority(ctx: Context, caller: Caller, *specs: Spec) -> None:
    """Raises NotAllowed where a user of a shared daemon asks for a higher priority than is theirs to give."""
    priority = max(spec.resources.priority for spec in specs)
    most = ctx.config.queue.limit_of(caller.name).priority
    if is_admin(ctx, caller) or priority <= most:
        return
    hint = (
        f"Lower it, or ask an admin ({admins(ctx)}) for more: queue.users.{caller.name}.priority in "
        "config.yaml."
    )
    raise NotAllowed(
        f"resources.priority is {priority}; {caller.name}'s runs may have {most} at most", hint=hint
    )


def over_limit(ctx: Context, run: RunRow, active: Sequence[RunRow], at: float | None = None) -> str:
    """Say which limit of its user keeps a queued run waiting, wherever it would go; "" when none does.

    active: the runs of all users that work.
    at: Unix time; None: now.
    """
    limit = ctx.config.queue.limit_of(run.owner)
    user = run.owner
    own_runs = [other for other in active if other.owner_uid == run.owner_uid]
    if run.group and (most := groups.limit_of(ctx.store, run.owner_uid, run.group)) is not None:
        in_group = sum(other.group == run.group for other in own_runs)
        if in_group >= most:
            return f"waits for group {run.group} ({in_group} of {most} running)"
    working = len(own_runs)
    if limit.runs is not None and working >= limit.runs:
        return f"{user} has {working} of {limit.runs} runs working"
    if limit.device_hours is not None and (used_up := over_hours(ctx, user, run.owner_uid, at)):
        return used_up
    return _over_disk(ctx, run, limit.disk) if limit.disk is not None else ""


def _over_disk(ctx: Context, run: RunRow, limit: int) -> str:
    """Say that a user's runs take more than they may on disk; "" when they do not.

    That is measured, unless it was done in the last minute or is under way.
    """
    disk = ctx.storage.by_owner

    async def measure(directories: dict[int, list[Path]]) -> None:
        try:
            disk.used = {uid: await asyncio.to_thread(bytes_of, paths) for uid, paths in directories.items()}
        finally:
            disk.at = time.monotonic()
            disk.is_measured = False
            ctx.loop.poke()

    if not disk.is_measured and time.monotonic() - disk.at >= _MEASURE_SECONDS:
        disk.is_measured = True
        ctx.spawn(measure(runs.directories(ctx.store)))
    used = disk.used.get(run.owner_uid)
    if used is None:
        return f"checking how much {run.owner}'s runs take on disk"
    if used < limit:
        return ""
    return (
        f"{run.owner}'s runs take {size(used)} of {size(limit)} on disk; `lorad gc` and `lorad rm` free some"
    )
