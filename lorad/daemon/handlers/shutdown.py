"""The daemon exits; runs and pools go on, and the next daemon adopts them."""

from __future__ import annotations

import os
from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.request import Call


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    ctx.close()
    return {"pid": os.getpid()}
