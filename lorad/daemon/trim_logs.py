"""Now and then the logs of all that is alive are looked at: drivers, pools and gateways."""

import asyncio
import time
from collections.abc import Iterator

from lorad.box.paths import AttemptDir
from lorad.daemon.beside.loggers import living_loggers
from lorad.daemon.beside.notify import living_notifiers
from lorad.daemon.context import Context
from lorad.daemon.process.log_trim import cut_all
from lorad.daemon.serving.gateways import living_gateways
from lorad.daemon.serving.tinker import living_doors
from lorad.states import ACTIVE
from lorad.store import runs

LOOK_SECONDS = 5.0


def rotate(ctx: Context) -> None:
    """Look at the sizes now and then, in a thread."""
    now = time.monotonic()
    if now - ctx.storage.rotated_at < LOOK_SECONDS:
        return
    ctx.storage.rotated_at = float("inf")  # two that cut the same log would mix it up
    ctx.spawn(_rotated(ctx, list(_living(ctx))))


async def _rotated(ctx: Context, attempts: list[AttemptDir]) -> None:
    try:
        await asyncio.to_thread(cut_all, attempts, ctx.config.supervision.log_bytes)
    finally:
        ctx.storage.rotated_at = time.monotonic()


def _living(ctx: Context) -> Iterator[AttemptDir]:
    yield from (run.attempt_dir for run in runs.in_states(ctx.store, *ACTIVE))
    yield from (pool.attempt() for pool in ctx.pools.values() if pool.process.is_up)
    yield from living_gateways(ctx)
    yield from living_doors(ctx)
    yield from living_loggers(ctx)
    yield from living_notifiers(ctx)
