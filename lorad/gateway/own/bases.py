"""What the gateway needs to use a base model: its tokenizer, its limits, and the connections to pools."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lorad.errors import PoolLost
from lorad.models.facts import read_facts
from lorad.protocol.aio import AsyncConnection
from lorad.protocol.calls import Nothing
from lorad.protocol.status import PoolInfo
from lorad.rl.tokenizer import Tokenizer


class Base:
    """A base model as the gateway uses it. Raises SpecError when the model's directory is not usable.

    Attributes:
        rendering: Locked while the chat template is rendered: requests for a slow template wait without a
            thread each.
        token_text: Returns the text of one token alone; a part of a character is U+FFFD.
    """

    def __init__(self, directory: Path) -> None:
        facts = read_facts(directory)
        self.tokenizer = Tokenizer(directory)
        self.rendering = asyncio.Lock()
        self.eos_ids = self.tokenizer.eos_ids  # a chat template is asked for its own: not on the loop
        self.vocab = facts.vocab
        self.max_positions = facts.max_positions
        decode = self.tokenizer.decode
        self.token_text = lru_cache(1 << 16)(lambda token: decode([token], skip_special=False))


class Bases:
    """Keeps one base for each directory, which is read when it is first asked for."""

    def __init__(self) -> None:
        self._reading: dict[str, asyncio.Task[Base]] = {}

    async def get(self, directory: str) -> Base:
        reading = self._reading.get(directory)
        if reading is None or (reading.done() and reading.exception() is not None):
            reading = self._reading[directory] = asyncio.create_task(asyncio.to_thread(Base, Path(directory)))
        return await asyncio.shield(reading)


@dataclass(frozen=True)
class AnsweringPool:
    """A pool that answers, and what it said of itself."""

    connection: AsyncConnection
    info: PoolInfo


async def next_item(items: AsyncGenerator[Any, None], seconds: float) -> Any:
    """Return a pool's next item. Raises PoolLost when the pool says nothing for so long."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(items)
    except TimeoutError:
        raise PoolLost(f"the pool said nothing for {seconds:.0f} s", hint="Ask again.") from None


class Peers:
    """Keeps one connection to each pool, which is opened when first needed and again after it was lost."""

    def __init__(self) -> None:
        self._opening: dict[str, asyncio.Task[AnsweringPool]] = {}

    async def get(self, socket: str) -> AnsweringPool:
        """Return the pool behind a socket. Raises PoolLost."""
        opening = self._opening.get(socket)
        if opening is None or (
            opening.done() and (opening.exception() or opening.result().connection.is_lost)
        ):
            opening = self._opening[socket] = asyncio.create_task(self._open(socket))
        return await asyncio.shield(opening)

    async def close(self) -> None:
        for opening in self._opening.values():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            if not opening.cancelled() and not opening.exception():
                await opening.result().connection.close()

    async def _open(self, socket: str) -> AnsweringPool:
        connection = await AsyncConnection.open(Path(socket))
        try:
            info: PoolInfo = await connection.call("hello", Nothing())
        except BaseException:
            await connection.close()
            raise
        return AnsweringPool(connection, info)
