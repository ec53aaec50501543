"""Keep a version: its files, and loaded in the pool of its base while that is up."""

from __future__ import annotations

from lorad.client.shapes import Version
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import version_view
from lorad.daemon.context import Context
from lorad.daemon.runs.versions import await_files, files_gone, find_version, has_files, in_hand
from lorad.daemon.serving.table import write_table
from lorad.store.rows import VersionRow
from lorad.store.versions import get_version, set_pinned


async def handle(ctx: Context, call: Call) -> Version:
    """Raises NotFound, Conflict (its files are gone)."""
    version = find_version(ctx, call.request.match_info["version"])
    with in_hand(ctx, version):
        await await_files(ctx, version)
        return version_view(ctx, change(ctx, version, pinned=True, by=call.caller.name))


def change(ctx: Context, version: VersionRow, *, pinned: bool, by: str) -> VersionRow:
    """Row, event and the daemon's journal, then the gateway's table: the version's row."""
    run, number = version.run, version.version
    with ctx.store.write():
        before = get_version(ctx.store, run, number)
        if pinned and not has_files(before.path):
            raise files_gone(before)
        row = set_pinned(ctx.store, run, number, pinned, by=by)
        if before.pinned != pinned:
            ctx.journal.append("pin" if pinned else "unpin", run, by, version=number)
    ctx.serving.served += 1
    ctx.loop.poke()
    write_table(ctx)
    return row
