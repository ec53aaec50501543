"""Pools that are up."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.pools import refresh
from lorad.daemon.request import Call
from lorad.daemon.views import pool_view


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    await refresh(ctx)
    return [pool_view(ctx, pool) for pool in ctx.pools.values() if pool.process.is_up]
