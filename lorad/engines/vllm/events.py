"""What one request is answered, so that it can end before the server ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from lorad.engines.remote.http import Http


class Events:
    """The events of one request. Use it as an async context manager: the connection is closed at its end.

    vLLM ends a sample whose connection is closed.
    """

    def __init__(self, http: Http, path: str, body: dict[str, Any]) -> None:
        self.aborted = False  # set by a caller that ends it early
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._error: Exception | None = None
        self._reader = asyncio.create_task(self._read(_stream(http, path, body)))

    async def __aenter__(self) -> Events:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Raises what the request raised, unless it was cut off."""
        while (event := await self._queue.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error

    @property
    def is_over(self) -> bool:
        """Return whether the server has said its last word."""
        return self._reader.done()

    async def over(self, seconds: float) -> None:
        """Wait for that, but not longer."""
        await asyncio.wait([self._reader], timeout=seconds)

    def cut(self) -> None:
        """Close the connection; what has come is still there."""
        self._reader.cancel()

    async def _read(self, stream: AsyncGenerator[Any, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for event in stream:
                    self._queue.put_nowait(event)
        except Exception as error:  # whatever it is, it is raised in the reader
            self._error = error
        finally:
            self._queue.put_nowait(None)


async def _stream(http: Http, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
    if not body["stream"]:
        yield await http.post(path, body)
        return
    async with contextlib.aclosing(http.events(path, body)) as events:
        async for event in events:
            yield event
