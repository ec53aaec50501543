"""What one user may have at a time: devices, active runs, bytes on disk. A run over a limit waits and says
why.

It claims nothing: the runs behind it in the queue are placed as if it were not there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from lorad.daemon.access import admins, is_admin
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device
from lorad.daemon.pool import Pool
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.device_holders import user_name
from lorad.daemon.queue.tenants import tenants_of
from lorad.daemon.state import bytes_of
from lorad.errors import NotAllowed
from lorad.protocol.pool_setup import PoolSetup
from lorad.spec.model import Spec
from lorad.store import runs
from lorad.store.rows import RunRow
from lorad.text import size

MEASURE_SECONDS = 60.0


def refuse_priority(ctx: Context, caller: Caller, *specs: Spec) -> None:
    """Raises NotAllowed where a user of a shared daemon asks for a higher priority than is theirs to give."""
    asked, most = (
        max(spec.resources.priority for spec in specs),
        ctx.config.queue.limit_of(caller.name).priority,
    )
    if is_admin(ctx, caller) or asked <= most:
        return
    hint = (
        f"Lower it, or ask an admin ({admins(ctx)}) for more: queue.users.{caller.name}.priority in "
        "config.yaml."
    )
    raise NotAllowed(
        f"resources.priority is {asked}; {caller.name}'s runs may have {most} at most", hint=hint
    )


def over_limit(ctx: Context, run: RunRow) -> str:
    """Say which limit of its user keeps a queued run waiting, wherever it would go; "" when none does."""
    limit, user = ctx.config.queue.limit_of(run.owner), run.owner
    if limit.runs is not None and (working := runs.count_active(ctx.store, run.owner_uid)) >= limit.runs:
        return f"{user} has {working} of {limit.runs} runs working"
    return over_disk(ctx, run, limit.disk) if limit.disk is not None else ""


def over_disk(ctx: Context, run: RunRow, limit: int) -> str:
    measure(ctx)
    used = ctx.storage.by_owner.used.get(run.owner_uid)
    if used is None:
        return f"checking how much {run.owner}'s runs take on disk"
    if used < limit:
        return ""
    return (
        f"{run.owner}'s runs take {size(used)} of {size(limit)} on disk; `lorad gc` and `lorad rm` free some"
    )


def over_devices(
    ctx: Context, setup: PoolSetup, devices: Sequence[Device], user: str
) -> tuple[str, list[Pool]]:
    """Say why a pool's owner may not have these devices as well; "" if they may. Lists their idle pools that
    could end.

    A pool that is up already takes no more than it has.
    """
    limit = ctx.config.queue.limit_of(user).devices
    if limit is None:
        return "", []
    theirs = [pool for pool in ctx.pools.values() if pool.setup.owner == setup.owner and is_used(ctx, pool)]
    if any(pool.setup.key == setup.key for pool in theirs):
        return "", []
    held, asked = {name for pool in theirs for name in pool.setup.names}, {device.name for device in devices}
    if len(held | asked) <= limit:
        return "", []
    idle = [pool for pool in theirs if not (tenants_of(ctx, pool) or pool.serves or pool.guests)]
    more = f", it needs {len(asked)}" if len(asked) > 1 else ""
    return f"{user} has {len(held)} of {limit} device{'' if limit == 1 else 's'}{more}", idle


def is_used(ctx: Context, pool: Pool) -> bool:
    """Check whether the pool is up, or will be because runs are placed in it."""
    return pool.process.is_up or bool(tenants_of(ctx, pool))


def user_of(run: RunRow | None, setup: PoolSetup) -> str:
    return str(run.owner) if run is not None else user_name(setup.owner)


def measure(ctx: Context) -> None:
    """Begin to measure, unless that was done in the last minute or is under way."""
    if ctx.storage.by_owner.is_measured or time.monotonic() - ctx.storage.by_owner.at < MEASURE_SECONDS:
        return
    ctx.storage.by_owner.is_measured = True
    ctx.spawn(measured(ctx, runs.directories(ctx.store)))


async def measured(ctx: Context, directories: dict[int, list[Path]]) -> None:
    try:
        ctx.storage.by_owner.used = {
            uid: await asyncio.to_thread(bytes_of, paths) for uid, paths in directories.items()
        }
    finally:
        ctx.storage.by_owner.at, ctx.storage.by_owner.is_measured = time.monotonic(), False
        ctx.loop.poke()
