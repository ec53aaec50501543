"""Everything about one run."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.daemon.views import show_view
from lorad.store import runs


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    return show_view(ctx, runs.get(ctx.store, call.run))
