"""Processes of this home that no attempt accounts for."""

from __future__ import annotations

import asyncio

from lorad.client.box_shapes import Orphan
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.process.orphans import find_orphans


async def handle(ctx: Context, call: Call) -> list[Orphan]:
    return await asyncio.to_thread(find_orphans, ctx.home)
