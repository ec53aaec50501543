"""What Prometheus reads: see `lorad/daemon/api/metrics.py`."""

from __future__ import annotations

from aiohttp import web

from lorad.daemon.api.call import Call
from lorad.daemon.api.metrics import CONTENT_TYPE, exposition
from lorad.daemon.context import Context


async def handle(ctx: Context, call: Call) -> web.Response:
    return web.Response(text=await exposition(ctx), headers={"Content-Type": CONTENT_TYPE})
