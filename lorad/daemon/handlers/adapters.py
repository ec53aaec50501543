"""Versions of one run or of all."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.pools import refresh
from lorad.daemon.request import Call
from lorad.daemon.views import version_view
from lorad.store import runs
from lorad.store.versions import versions


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    run = call.text("run")
    if run is not None:
        runs.get(ctx.store, run)
    await refresh(ctx)
    return [version_view(ctx, row) for row in versions(ctx.store, run)]
