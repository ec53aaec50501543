"""Copies that are in the engine for the time of a test alone, one at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lorad.engines.base import AdapterSource, Engine

MARK = "~"  # in the names of copies, and of nothing else


class Temporaries:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._one = asyncio.Lock()
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def loaded(self, name: str, what: str, source: AdapterSource) -> AsyncIterator[str]:
        """Provide the name of a copy of `name`, gone again at the end. Inside `Engine.settled`."""
        async with self._one:
            copy = f"{name}{MARK}{what}{next(self._numbers)}"
            await self._engine.load(copy, source)
            try:
                yield copy
            finally:
                await self._engine.unload(copy)
