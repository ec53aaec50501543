"""What Prometheus reads: see `lorad/daemon/metrics.py`."""

from __future__ import annotations

from aiohttp import web

from lorad.daemon.context import Context
from lorad.daemon.metrics import CONTENT_TYPE, exposition
from lorad.daemon.request import Call


async def handle(ctx: Context, call: Call) -> web.Response:
    return web.Response(text=await exposition(ctx), headers={"Content-Type": CONTENT_TYPE})
