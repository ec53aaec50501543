"""Who the daemon is and how it is."""

from __future__ import annotations

import os
from typing import Any

import lorad
from lorad.daemon.context import Context
from lorad.daemon.gateway import gateway_socket
from lorad.daemon.request import Call

TROUBLES = 5  # of what the daemon cannot do now, and tries again


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    counts = ctx.store.rows("SELECT state, count(*) AS runs FROM runs GROUP BY state")
    return {
        "pid": os.getpid(),
        "version": lorad.__version__,
        "home": str(ctx.home.root),
        "started_at": ctx.started_at,
        "gateway": gateway_socket(ctx),
        "runs": {row["state"]: row["runs"] for row in counts},
        "troubles": [] if ctx.system else list(dict.fromkeys(ctx.troubles.values()))[:TROUBLES],
        "database": {"schema": ctx.store.schema, "bytes": ctx.home.database.stat().st_size},
    }
