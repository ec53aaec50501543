"""The end of a pin: the version goes when nothing else needs it."""

from __future__ import annotations

from lorad.client.shapes import Version
from lorad.daemon.context import Context
from lorad.daemon.handlers.pin import change
from lorad.daemon.request import Call
from lorad.daemon.versions import find_version
from lorad.daemon.views import version_view


async def handle(ctx: Context, call: Call) -> Version:
    """Raises NotFound."""
    version = find_version(ctx, call.request.match_info["version"])
    return version_view(ctx, change(ctx, version, pinned=False, by=call.caller.name))
