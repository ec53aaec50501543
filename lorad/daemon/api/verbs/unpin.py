"""The end of a pin: the version goes when nothing else needs it."""

from __future__ import annotations

from lorad.client.shapes import Version
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.pin import change
from lorad.daemon.api.views import version_view
from lorad.daemon.context import Context
from lorad.daemon.runs.versions import find_version


async def handle(ctx: Context, call: Call) -> Version:
    """Raises NotFound."""
    version = find_version(ctx, call.request.match_info["version"])
    return version_view(ctx, change(ctx, version, pinned=False, by=call.caller.name))
