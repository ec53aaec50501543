"""A server is started once for many tests; each of them finds an engine that nobody has used."""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import cast

import msgspec
import numpy as np

from lorad.engines.base import (
    BASE,
    AdapterSource,
    Engine,
    EngineCapabilities,
    EngineHealth,
    LoadedVersion,
    Scored,
    Scorer,
)
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling

_numbers = itertools.count()


class OwnNames(Engine):
    """`engine` with names that are this object's own: names are never used twice, and every test says
    `run@1`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._prefix = f"t{next(_numbers)}-"

    def _inner(self, name: str) -> str:
        return name if name == BASE else self._prefix + name

    def _outer(self, loaded: LoadedVersion) -> LoadedVersion:
        return msgspec.structs.replace(loaded, name=loaded.name.removeprefix(self._prefix))

    def capabilities(self) -> EngineCapabilities:
        return self.engine.capabilities()

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        return self._outer(await self.engine.load(self._inner(name), source))

    async def unload(self, name: str) -> None:
        await self.engine.unload(self._inner(name))

    async def loaded(self) -> Sequence[LoadedVersion]:
        return [self._outer(version) for version in await self.engine.loaded()]

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        inner = self.engine.generate(request, self._inner(version), prompts, sampling)
        async with aclosing(cast("AsyncGenerator[Chunk, None]", inner)) as chunks:
            async for chunk in chunks:
                assert chunk.version == self._inner(version)
                yield msgspec.structs.replace(chunk, version=version)

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        return await self.engine.score(self._inner(version), batch)

    async def routed_scores(self, version: str, batch: Batch) -> Sequence[Scored]:
        return await self.engine.routed_scores(self._inner(version), batch)

    async def scores(self, version: str, batch: Batch) -> Sequence[np.ndarray]:
        return await self.engine.scores(self._inner(version), batch)

    async def ranked(
        self, version: str, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
    ) -> Ranked:
        return await self.engine.ranked(self._inner(version), texts, starts, most)

    def settled(self) -> AbstractAsyncContextManager[None]:
        return self.engine.settled()

    def on_return(self, check: Callable[[Scorer], Awaitable[None]]) -> None:
        async def with_own_names(score: Scorer) -> None:
            async def own_score(version: str, batch: Batch) -> np.ndarray:
                return await score(self._inner(version), batch)

            await check(own_score)

        self.engine.on_return(with_own_names)

    async def abort(self, request: str) -> None:
        await self.engine.abort(request)

    async def drain(self) -> None:
        await self.engine.drain()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def health(self) -> EngineHealth:
        return await self.engine.health()

    async def close(self) -> None:
        """The engine stays; what this object loaded and asked for goes."""
        self.engine.on_return(no_check)
        for version in await self.engine.loaded():
            await self.engine.unload(version.name)
        await self.engine.drain()


async def no_check(score: Scorer) -> None:
    """What returns is served from as it is."""
