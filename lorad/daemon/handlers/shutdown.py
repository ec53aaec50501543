"""The daemon exits; runs, pools and, unless it is to end, the gateway go on, and the next daemon adopts them."""

from __future__ import annotations

import os
from typing import Any

from msgspec import Struct

from lorad.daemon.context import Context
from lorad.daemon.gateway import stop_gateway
from lorad.daemon.request import Call


class Body(Struct):
    gateway: bool = False


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    stopped = call.json(Body).gateway and stop_gateway(ctx)
    ctx.close()
    return {"pid": os.getpid(), "gateway": stopped}
