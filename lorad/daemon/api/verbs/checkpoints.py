"""List the checkpoints from which a run can resume, oldest first."""

from __future__ import annotations

from lorad.client.shapes import Checkpoint
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.store import runs
from lorad.store.checkpoints import checkpoints


async def handle(ctx: Context, call: Call) -> list[Checkpoint]:
    runs.get(ctx.store, call.run)
    return [of_row(Checkpoint, row) for row in await ctx.read(checkpoints, call.run)]
