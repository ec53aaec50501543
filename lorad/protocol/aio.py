"""The calling side of the pool's protocol for asyncio: many calls at once on one socket."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

from lorad.errors import LoradError, PoolLost, from_wire
from lorad.protocol import frames
from lorad.protocol.calls import CANCEL, VERBS, Answer, Call
from lorad.protocol.listener import uid_of

_CONNECT_SECONDS = 5.0


class AsyncConnection:
    """Calls to one pool, from nobody in particular: verbs that belong to a run are not for it.

    Any failure of the socket raises PoolLost in all calls that are under way; the connection is of no further
    use then. Answers that nobody has read yet are kept, so that a slow reader holds up no other call.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[Answer | LoradError]] = {}
        self._why = ""  # why the connection is lost
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Connect to a pool. Raises PoolLost when nobody answers."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(path))
            # root follows any link: the process is of the user in whose directory the socket lies
            if uid_of(writer.get_extra_info("socket")) != path.parent.stat().st_uid:
                writer.close()
                raise PermissionError(13, "another user answers")
            return cls(reader, writer)
        except OSError as error:  # a timeout is one
            raise PoolLost(f"no pool answers on {path}: {error.strerror or 'in time'}") from error

    @property
    def is_lost(self) -> bool:
        return bool(self._why)

    @property
    def calls(self) -> int:
        """Count the calls in progress."""
        return len(self._calls)

    async def call(self, verb: str, args: Any) -> Any:
        """Return the result of a verb; the items of a stream are dropped. Raises what the pool raised."""
        async with contextlib.aclosing(self.stream(verb, args)) as answers:
            *_, result = [answer async for answer in answers]
        return result

    async def stream(self, verb: str, args: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of a verb, then its result. Closing it early makes the pool end the verb."""
        if self._why:
            raise self._lost()
        kind = VERBS[verb]
        number = next(self._ids)
        answers = self._calls[number] = asyncio.Queue()
        is_over = False
        try:
            self._send(Call(number, verb, args))
            while not is_over:
                answer = await answers.get()
                is_over = isinstance(answer, LoradError) or answer.kind != "item"
                if isinstance(answer, LoradError):
                    raise answer
                if answer.kind == "error":
                    raise from_wire(answer.body)
                expected = kind.item if answer.kind == "item" else kind.result
                assert expected is not None
                yield frames.converted(answer.body, expected)
        finally:
            del self._calls[number]
            if not is_over and not self._why:
                self._send(Call(number, CANCEL, number))

    async def close(self) -> None:
        """Close the connection; all calls in progress raise PoolLost."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._lose("the connection was closed")

    def _send(self, call: Call) -> None:
        for part in frames.encode(call):
            self._writer.write(part)

    async def _read(self) -> None:
        try:
            while True:
                prefix = frames.parse_prefix(await self._reader.readexactly(frames.PREFIX.size))
                answer = frames.decode(prefix, await self._reader.readexactly(prefix.body), Answer)
                if (waiting := self._calls.get(answer.id)) is not None:  # else its reader has left
                    waiting.put_nowait(answer)
        except (OSError, EOFError, frames.BadFrame) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self._why = self._why or why or "the connection ended"
        self._writer.close()
        for waiting in self._calls.values():
            waiting.put_nowait(self._lost())

    def _lost(self) -> PoolLost:
        return PoolLost(f"the pool went away: {self._why}", hint="Ask again; the daemon starts another.")
