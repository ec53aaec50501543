"""Memory for keys and values that calls with a batch of their own have to share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Budget:
    """So many bytes, first come first served; who wants more than all of them gets all.

    Belongs to one asyncio loop.
    """

    def __init__(self, most: int) -> None:
        self.most = self.left = most
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, wanted: int) -> AsyncIterator[None]:
        """Wait until so much is free, and give it back in the end."""
        wanted = min(wanted, self.most)
        async with self._turn:
            while wanted > self.left:
                self._freed.clear()
                await self._freed.wait()
            self.left -= wanted
        try:
            yield
        finally:
            self.left += wanted
            self._freed.set()
