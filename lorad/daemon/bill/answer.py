"""The bill, with prices and with what runs take on disk."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from lorad.daemon.access import sees_all
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.limits import quotas_of
from lorad.daemon.state import bytes_of
from lorad.records.bill import Bill, BillLine
from lorad.store import runs
from lorad.store.bill import HOUR, By, bill, owners_of_uses

KEYS: Sequence[By] = get_args(By)
_OF_RUNS = ("run", "user", "sweep")
_SIZES_SECONDS = 60.0  # until a directory is measured again
_SUMS = (
    *("held", "busy", "wasted", "sampled", "trained"),
    *("generated", "served", "wasted_tokens", "prompts", "cached"),
)


async def bill_of(
    ctx: Context,
    caller: Caller,
    by: By,
    *,
    user: str | None = None,
    since: float | None = None,
    until: float | None = None,
) -> Bill:
    """Add up what the caller may see, which may be only what they used themselves.

    Lines of runs say what these take on disk: then only runs of the caller are measured, as a name in their
    bill may be another user's run by now.
    """
    only_uid = None if sees_all(ctx, caller) else caller.uid
    rows = await ctx.read(bill, by, since=since, until=until, user=user, owner_uid=only_uid)
    by_key: dict[str, list[BillLine]] = {}  # rows of a key differ by their device
    for row in rows:
        price = ctx.config.prices.of(row.device)
        cost = None if price is None else row.held / HOUR * price
        by_key.setdefault(row.key, []).append(replace(row, cost=cost if row.held else 0.0))
    lines = [_sum(key, of_devices) for key, of_devices in by_key.items()]
    lines.sort(key=lambda line: (not line.key, -line.held, line.key))
    if by in _OF_RUNS:
        keys = {line.key for line in lines if line.key}
        billed = []
        for run in await ctx.read(runs.every):
            key = {"run": run.name, "user": run.owner, "sweep": run.sweep or "-"}[by]
            if key in keys and only_uid in (None, run.owner_uid):
                billed.append((key, run.directory))
        disk = await asyncio.to_thread(_measure, ctx.bill.sizes, billed)
        lines = [replace(line, disk=disk.get(line.key)) for line in lines]
    total = _sum("", lines)
    first = None if since is None else float(since // HOUR * HOUR)
    quotas = [] if by not in _OF_RUNS else quotas_of(ctx, await ctx.read(owners_of_uses), only_uid, user)
    return Bill(by, lines, total, ctx.config.prices.currency, first, until, quotas)


def _sum(key: str, lines: Sequence[BillLine]) -> BillLine:
    costs = [line.cost for line in lines]
    joules = [line.joules for line in lines if line.joules is not None]
    sizes = [line.disk for line in lines if line.disk is not None]
    owners = {line.owner for line in lines}
    return BillLine(
        key=key,
        owner=owners.pop() if len(owners) == 1 else "",
        **{name: sum(getattr(line, name) for line in lines) for name in _SUMS},
        joules=sum(joules) if joules else None,
        memory=max((line.memory for line in lines), default=0),
        disk=sum(sizes) if sizes else None,
        cost=None if None in costs else sum(cost for cost in costs if cost is not None),
    )


def _measure(sizes: dict[str, tuple[float, int]], billed: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Add up the bytes of directories by key.

    sizes: when and how large a directory was measured, which is kept here.
    """
    sums: dict[str, int] = {}
    for key, directory in billed:
        at, size = sizes.get(directory, (float("-inf"), 0))
        if time.monotonic() - at > _SIZES_SECONDS:
            size = bytes_of([Path(directory)], on_disk=True)
            sizes[directory] = time.monotonic(), size
        sums[key] = sums.get(key, 0) + size
    return sums
