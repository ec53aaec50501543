"""A process whose event loop does not come round any more ends itself, and its log has the stacks.

What a user's files make a library do may hold the interpreter for ever: a thread in C watches.
"""

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_HUNG_SECONDS = 30.0
_ROUND_SECONDS = 1.0


@asynccontextmanager
async def watched() -> AsyncIterator[None]:
    watching = asyncio.create_task(_come_round())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _come_round() -> None:
    try:
        while True:
            faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
            await asyncio.sleep(_ROUND_SECONDS)
    finally:
        faulthandler.cancel_dump_traceback_later()
