"""All aliases and what they serve."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.store.aliases import aliases


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    return aliases(ctx.store)
