"""All aliases and what they serve."""

from __future__ import annotations

from typing import Any

from lorad.daemon.access import seen_aliases
from lorad.daemon.context import Context
from lorad.daemon.request import Call


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    return seen_aliases(ctx, call.caller)
