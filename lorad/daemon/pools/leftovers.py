"""Clears up after pools that are over: what one leaves that was killed is nobody's otherwise."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL

from lorad.children import leftovers
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool

log = logging.getLogger("lorad.daemon")

COMMAND = (sys.executable, "-P", "-m", leftovers.__name__)


async def clear_up(ctx: Context, pool: Pool) -> None:
    """As the pool's own user: what it left says whom to kill and what to remove."""
    user = ctx.user(pool.setup.owner)
    if user is None:
        await asyncio.to_thread(leftovers.clean_leftovers, pool.work)
        return
    try:
        process = await asyncio.create_subprocess_exec(
            *user.command([*COMMAND, str(pool.work)], pool.work),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            env={**user.environment, **ctx.commands.environment(ctx.home)},
        )
        await process.wait()
    except OSError as error:
        log.warning("pool %s: what it left was not cleared up: %s", pool.id, error)
