"""Find the owner of a model that the front of a shared gateway was asked for; the owner's own gateway is
started.
"""

from __future__ import annotations

from msgspec import Struct

from lorad.client.shapes import ServingOwner
from lorad.daemon.access import must_see
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.runs.versions import find_version, name_of
from lorad.daemon.serving.gateways import want_gateway_of
from lorad.store import runs


class Body(Struct):
    """An alias, run@number, or a run's name."""

    model: str


async def handle(ctx: Context, call: Call) -> ServingOwner:
    """Raises NotFound. No pool is started."""
    version = find_version(ctx, call.json(Body).model)
    run = must_see(ctx, call.caller, runs.get(ctx.store, version.run))
    want_gateway_of(ctx, run.owner_uid)
    return ServingOwner(name_of(version), run.owner_uid)
