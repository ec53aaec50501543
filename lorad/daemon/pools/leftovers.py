"""Clear up after pools that are over: nothing else removes what a killed pool leaves behind."""

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
    """Clear up as the pool's own user: the files that the pool left decide what is killed and removed."""
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
            env={**user.environment, **ctx.processes.commands.environment(ctx.home)},
        )
        await process.wait()
    except OSError as error:
        log.warning("pool %s: what it left was not cleared up: %s", pool.id, error)
