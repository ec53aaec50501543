"""All aliases, what they serve, and what their gateway says of requests for them."""

from __future__ import annotations

from lorad.client.shapes import ServedAlias
from lorad.daemon.access import of_alias, seen_aliases
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.daemon.process.users import name_of
from lorad.daemon.serving.traffic import traffic_of
from lorad.store.aliases import rollbacks
from lorad.store.versions import held_versions


async def handle(ctx: Context, call: Call) -> list[ServedAlias]:
    rows = seen_aliases(ctx, call.caller)
    owners = [of_alias(row).owner_uid for row in rows]
    names = {uid: name_of(uid) for uid in {*owners}}
    steps = {(version.run, version.version): version.step for version in held_versions(ctx.store)}
    traffic = await traffic_of(ctx, rows)
    before = {alias: f"{run}@{version}" for alias, (run, version) in rollbacks(ctx.store).items()}
    return [
        of_row(
            ServedAlias,
            row,
            owner=names[uid],
            step=steps.get((row.run, row.version)),
            traffic=traffic[row.alias],
            previous=before.get(row.alias),
        )
        for row, uid in zip(rows, owners, strict=True)
    ]
