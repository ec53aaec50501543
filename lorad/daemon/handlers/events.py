"""Events as they happen, one JSON object a line, until the reader or the daemon goes."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store import events, runs

IDLE_SECONDS = 5.0


async def handle(ctx: Context, call: Call) -> web.StreamResponse:
    """`after=-1`: only new ones. `idle` tells a reader that the line is up."""
    run, after = call.text("run"), call.number("after", 0)
    if run is not None:
        runs.get(ctx.store, run)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    cursor = events.last_id(ctx.store) if after < 0 else after
    await response.prepare(call.request)
    try:
        while not ctx.closing:
            cursor = await send(ctx, response, cursor, run)
    except (ConnectionError, OSError):
        pass  # the reader went
    return response


async def send(ctx: Context, response: web.StreamResponse, cursor: int, run: str | None) -> int:
    """What is new, else one `idle` after a while: the new cursor."""
    until, rung = time.monotonic() + IDLE_SECONDS, ctx.waker.bell()
    while not (found := events.after(ctx.store, cursor, run, 500)):
        if ctx.closing or not await ctx.waker.rung(rung, until - time.monotonic()):
            found = [idle(cursor)]
            break
        rung = ctx.waker.bell()  # it may have rung for other runs
    await response.write(b"".join(msgspec.json.encode(event) + b"\n" for event in found))
    return max([cursor, *(int(event["id"]) for event in found)])


def idle(cursor: int) -> dict[str, Any]:
    return {"id": cursor, "at": time.time(), "run": None, "kind": "idle", "data": {}}
