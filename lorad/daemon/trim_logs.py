"""Cut the logs of all that is alive where they became too large: drivers, pools and services."""

import asyncio
import time

from lorad.daemon.context import Context
from lorad.daemon.process.log_trim import cut_all
from lorad.daemon.services.table import living_services
from lorad.states import ACTIVE
from lorad.store import runs

LOOK_SECONDS = 5.0


def rotate(ctx: Context) -> None:
    """Look at the sizes now and then, in a thread."""
    now = time.monotonic()
    if now - ctx.storage.rotated_at < LOOK_SECONDS:
        return
    ctx.storage.rotated_at = float("inf")  # two that cut the same log would mix it up
    living = [run.attempt_dir for run in runs.in_states(ctx.store, *ACTIVE)]
    living += [pool.attempt() for pool in ctx.pools.values() if pool.process.is_up]
    living += [attempt for _, attempt in living_services(ctx)]

    async def cut() -> None:
        try:
            await asyncio.to_thread(cut_all, living, ctx.config.supervision.log_bytes)
        finally:
            ctx.storage.rotated_at = time.monotonic()

    ctx.spawn(cut())
