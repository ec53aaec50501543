"""Checkpoints from which a run can go on, oldest first."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store import runs
from lorad.store.checkpoints import checkpoints


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    runs.get(ctx.store, call.run)
    return [to_builtins(row) for row in await ctx.read(checkpoints, call.run)]
