"""Ends a process whose event loop does not come round any more, with the stacks in its log.

A user's files may make a library hold the interpreter for ever, so that a thread in C watches.
"""

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_HUNG_SECONDS = 30.0
_ROUND_SECONDS = 1.0


@asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """End this process when its event loop hangs within the block."""

    async def come_round() -> None:
        try:
            while True:
                faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
                await asyncio.sleep(_ROUND_SECONDS)
        finally:
            faulthandler.cancel_dump_traceback_later()

    watching = asyncio.create_task(come_round())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
