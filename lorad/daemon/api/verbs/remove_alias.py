"""The end of an alias; its version stays until nothing else needs it."""

from __future__ import annotations

from lorad.client.shapes import RemovedAlias
from lorad.daemon.access import must_own, of_alias, of_run, owns
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.serving.table import write_table
from lorad.store import aliases, runs


async def handle(ctx: Context, call: Call) -> RemovedAlias:
    """Raises NotFound, StorageError (the gateway has not heard of it yet), NotAllowed.

    Whoever made the alias may end it, and so may the owner of the run that it serves: it keeps their files.
    """
    alias = call.request.match_info["alias"]
    async with ctx.serving.moving[alias]:
        row = aliases.get(ctx.store, alias)
        if not owns(ctx, call.caller, of_run(runs.get(ctx.store, row.run)).owner_uid):
            must_own(ctx, call.caller, of_alias(row))
        with ctx.store.write():
            before = aliases.remove(ctx.store, alias, by=call.caller.name)
            ctx.journal.append("alias", before.run, call.caller.name, alias=alias, version=None)
    ctx.serving.served += 1
    ctx.loop.poke()
    write_table(ctx)
    return RemovedAlias(alias)
