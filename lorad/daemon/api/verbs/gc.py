"""Delete what nothing can ask for: files of runs, logs of ended pools, directories of removed runs."""

import asyncio
from itertools import chain, groupby
from pathlib import Path

from lorad.daemon.access import is_admin, owns, seen_aliases
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.pools.life import refresh
from lorad.daemon.process.users import Caller
from lorad.daemon.storage.bundles import unused_bundles
from lorad.daemon.storage.garbage import all_doomed, still_doomed
from lorad.daemon.storage.prune import Doomed, delete, discard_all, sizes_of
from lorad.records.daemon import Collected, Deleted, KeptVersion
from lorad.records.requests import CollectRequest
from lorad.store.aliases import rollbacks

_TURN = 64  # items until other requests have their turn


async def collect(ctx: Context, call: Call) -> Collected:
    """Delete what `checkpoint` of each run allows, except what was pinned, aliased or loaded meanwhile."""
    body = call.json(CollectRequest)
    await refresh(ctx)
    sizes = await in_thread(ctx, call.caller.uid, sizes_of, await deletable(ctx, call.caller))
    doomed = [item for item in await deletable(ctx, call.caller) if item.path in sizes]
    if not body.dry_run:
        done = list[Doomed]()
        gone = list[Path]()
        for run, group in groupby(doomed, key=lambda item: item.run):
            for item in still_doomed(ctx, run, group):  # not what was asked for since
                done.append(item)
                if (path := delete(ctx, item)) is not None:
                    gone.append(path)
            await asyncio.sleep(0)
        await in_thread(ctx, call.caller.uid, discard_all, gone)
        doomed = done
    deleted = [Deleted(item.run, str(item.path), sizes[item.path], item.why) for item in doomed]
    total = sum(sizes[item.path] for item in doomed)
    before = rollbacks(ctx.store)
    aliases = [row.alias for row in seen_aliases(ctx, call.caller) if row.alias in before]
    versions = [KeptVersion(alias, "{}@{}".format(*before[alias])) for alias in aliases]
    return Collected(deleted, total, body.dry_run, versions)


async def deletable(ctx: Context, caller: Caller) -> list[Doomed]:
    """List what can be deleted of the caller's runs and bundles; for an admin, all that can be."""
    if is_admin(ctx, caller):
        doomed = all_doomed(ctx)
    else:
        mine = all_doomed(ctx, of=lambda run: owns(ctx, caller, run.owner_uid))
        doomed = chain(mine, unused_bundles(ctx, caller.uid))
    items = []
    for item in doomed:
        items.append(item)
        if len(items) % _TURN == 0:
            await asyncio.sleep(0)
    return items
