"""The end of an alias; its version stays until nothing else needs it."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.daemon.table import write_table
from lorad.store import aliases


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Raises NotFound, StorageError (the gateway has not heard of it yet)."""
    alias = call.request.match_info["alias"]
    async with ctx.moving[alias]:
        with ctx.store.write():
            before = aliases.remove(ctx.store, alias, by=call.caller.name)
            ctx.journal.append("alias", before["run"], call.caller.name, alias=alias, version=None)
    ctx.served += 1
    ctx.waker.poke()
    write_table(ctx)
    return {"alias": alias, "removed": True}
