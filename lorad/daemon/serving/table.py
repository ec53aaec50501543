"""Write what the gateway serves under which name: `gateway/table.json`, replaced as a whole.

It names all versions that are pinned or aliased, see `lorad/protocol/served.py`.

In a shared daemon the front uses this table. Each owner's gateway has a table of the owner's versions,
`gateway/owners/UID/table.json`, which that user may read, in a directory of the daemon's.
"""

import msgspec

from lorad.daemon.context import Context, request_of
from lorad.daemon.queue.setups import base_of
from lorad.daemon.services.gateway import GATEWAY
from lorad.daemon.services.service import OWN, give_table, process_of
from lorad.errors import LoradError
from lorad.protocol.served import FILE, Names, Served
from lorad.store import runs
from lorad.store.rows import VersionRow
from lorad.store.versions import held_versions


def keep_table(ctx: Context) -> None:
    """Write the tables when pins, aliases or pools have changed, and when the table is gone."""
    if ctx.serving.table != ctx.serving.served or not (ctx.home.gateway / FILE).is_file():
        write_table(ctx)


def write_table(ctx: Context) -> None:
    """Write the gateways' tables, without runs whose files cannot be read. Raises StorageError."""
    served = ctx.serving.served
    aliases: dict[str, str] = {}
    by_run: dict[str, list[VersionRow]] = {}
    for version in held_versions(ctx.store):
        aliases |= dict.fromkeys(version.aliases, version.name)
        by_run.setdefault(version.run, []).append(version)
    ready = [pool.setup for pool in ctx.pools.values() if pool.state == "ready"]
    entries: dict[str, Served] = {}
    for name, rows in by_run.items():
        run = runs.get(ctx.store, name)
        try:
            model_path = request_of(run).model_path
            base = base_of(ctx, run)
        except (OSError, msgspec.MsgspecError, LoradError):
            continue
        serving = (setup.socket for setup in ready if base is not None and setup.serves(base))
        socket = next(serving, None)
        for row in rows:
            about = (row.sha256, model_path, socket, row.path, row.created_at, run.owner_uid)
            entries[row.name] = Served(row.run, row.version, *about)
    table = Names(dict(sorted(aliases.items())), entries)
    for uid in GATEWAY.look(ctx):
        part = table
        if uid != OWN:
            own = {name: entry for name, entry in table.versions.items() if entry.owner_uid == uid}
            part = Names({alias: name for alias, name in table.aliases.items() if name in own}, own)
        give_table(ctx, process_of(ctx, GATEWAY, uid), part)
    ctx.serving.table = served
