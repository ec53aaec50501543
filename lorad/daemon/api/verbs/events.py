"""Stream events as they happen, one JSON object a line, or answer with the last ones at once."""

import asyncio
import time

import msgspec
from aiohttp import web

from lorad.daemon.access import seen_by_run
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.records.runs import Event
from lorad.store import events, runs

IDLE_SECONDS = 5.0
_MOST = 1000  # events that `last` may ask for


async def read_events(ctx: Context, call: Call) -> web.StreamResponse | list[Event]:
    """Stream the events after `after` (-1: only new ones), or answer with the newest `last` of them. An
    `idle` line shows the reader that the connection is up.
    """
    run = call.text("run")
    after = call.number("after", 0)
    if run is not None:
        runs.get(ctx.store, run)
    if call.text("last") is not None:
        count = min(max(call.number("last", 0), 0), _MOST)
        newest = await ctx.read(events.newest, count, run)
        return seen_by_run(ctx, call.caller, newest)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    cursor = events.last_id(ctx.store) if after < 0 else after
    await response.prepare(call.request)
    try:
        while not ctx.loop.closing:
            cursor = await _send(ctx, call.caller, response, cursor, run)
    except OSError:
        pass  # the reader went, or was dropped as it did not read
    return response


async def _send(
    ctx: Context, caller: Caller, response: web.StreamResponse, cursor: int, run: str | None
) -> int:
    """Send some new events, or one `idle` line after a while, and return the new cursor."""
    until = time.monotonic() + IDLE_SECONDS
    rung = ctx.loop.bell
    while not (lines := ctx.tail.after(cursor, run)):
        cursor = ctx.tail.newest
        if ctx.loop.closing or not await ctx.loop.rung(rung, until - time.monotonic()):
            await response.write(msgspec.json.encode(Event(cursor, time.time(), None, "idle")) + b"\n")
            return cursor
        rung = ctx.loop.bell  # the bell may have rung for other runs
    shown = seen_by_run(ctx, caller, lines)
    if shown:
        await response.write(b"".join(line.text for line in shown))
    await asyncio.sleep(0)  # others have their turn, however fast this one reads
    return lines[-1].id
