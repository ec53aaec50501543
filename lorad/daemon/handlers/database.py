"""Is the database whole, and is on disk what it tells of?"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from lorad.daemon.census import of_home
from lorad.daemon.context import Context
from lorad.daemon.request import Call


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Reads all of it, on a connection of its own."""
    return dict(msgspec.to_builtins(await asyncio.to_thread(of_home, ctx.home, ctx.runs_root)))
