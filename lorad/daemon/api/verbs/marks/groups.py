"""Groups of runs, and how many of each may work at a time. A group belongs to the user who names it."""

import re

from lorad.daemon.access import seen
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.errors import SpecError
from lorad.protocol.listener import user_name
from lorad.records.requests import GroupRequest
from lorad.records.runs import RunGroup
from lorad.spec.errors import NAME_HINT
from lorad.spec.numbers import NAME
from lorad.store import groups


async def list_groups(ctx: Context, call: Call) -> list[RunGroup]:
    """List the groups of runs that the caller may see."""
    rows = seen(ctx, call.caller, groups.groups(ctx.store))
    return [of_row(RunGroup, row, owner=user_name(row.owner_uid)) for row in rows]


async def limit_group(ctx: Context, call: Call) -> RunGroup:
    """Set how many runs of a group of the caller's work at a time. Raises SpecError for what is no name."""
    name = call.request.match_info["group"]
    limit = call.json(GroupRequest).limit
    if not re.match(NAME, name):
        raise SpecError(f"{name} is no name of a group", hint=NAME_HINT)
    groups.set_limit(ctx.store, call.caller.uid, name, limit)
    ctx.loop.poke()
    owner = call.caller.name
    mine = (row for row in groups.groups(ctx.store) if (row.owner_uid, row.name) == (call.caller.uid, name))
    return next((of_row(RunGroup, row, owner=owner) for row in mine), RunGroup(name, owner))
