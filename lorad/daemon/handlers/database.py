"""Is the database whole?"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store.check import check


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Reads all of it, on a connection of its own."""
    return dict(msgspec.to_builtins(await asyncio.to_thread(check, ctx.home.database)))
