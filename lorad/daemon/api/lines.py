"""Answer slow requests in lines that say what is being done; the last one holds the answer."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import msgspec
from aiohttp import web

from lorad.client.transport import LINES
from lorad.daemon.process.doing import begin_telling

SECONDS = 0.5  # between two lines, and before the first


async def in_lines(request: web.Request, work: Coroutine[Any, Any, web.StreamResponse]) -> web.StreamResponse:
    """Do the work of a request, and answer as usual if that is quick.

    work: raises nothing, and is done whether or not somebody still waits for the answer.
    """
    doing = begin_telling()
    task = asyncio.create_task(work)
    try:
        if (await asyncio.wait([task], timeout=SECONDS))[0]:
            return task.result()
        response = web.StreamResponse(headers={"Content-Type": LINES})
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            while not (await asyncio.wait([task], timeout=SECONDS))[0]:
                await response.write(msgspec.json.encode({"doing": doing.in_words()}) + b"\n")
        answer = await task
        assert isinstance(answer, web.Response) and isinstance(answer.body, bytes), "it is JSON"
        last = {"status": answer.status, "body": msgspec.Raw(answer.body)}
        with contextlib.suppress(ConnectionError):
            await response.write(msgspec.json.encode(last) + b"\n")
        return response
    finally:
        task.cancel()
