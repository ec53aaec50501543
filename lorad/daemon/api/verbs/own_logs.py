"""Read what the daemon and the gateways print, by byte offset."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from lorad.client.shapes import LogPart
from lorad.daemon.access import is_admin, must_be_admin
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.logs import MOST, read
from lorad.daemon.context import Context
from lorad.daemon.serving.gateways import gateway_of, public_gateway
from lorad.errors import SpecError


async def handle(ctx: Context, call: Call) -> LogPart:
    """Read a part of the log.

    Raises SpecError; NotAllowed for the daemon's own log, which mentions all users.
    """
    path = log_of(ctx, call, call.text("of") or "daemon")
    return await asyncio.to_thread(read, path, call.number("offset", 0), call.number("limit", MOST))


def log_of(ctx: Context, call: Call, of: str) -> Path:
    if of == "daemon":
        must_be_admin(ctx, call.caller)
        return ctx.home.daemon_log
    if of != "gateway":
        raise SpecError(f"no log of {of!r} without a run", hint="Choose daemon or gateway, or name a run.")
    gateway = public_gateway(ctx) if is_admin(ctx, call.caller) else gateway_of(ctx, call.caller.uid)
    lives = gateway.lives
    return lives[-1].log if lives else Path(os.devnull)
