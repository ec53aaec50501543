"""What the gateway serves under which name: `gateway/table.json`, replaced as a whole.

{aliases: {alias: "run@12"}, versions: {"run@12": {run, version, sha256, path, created_at, owner_uid,
    model_path,
socket}}}: all versions that are pinned or aliased. socket: of a pool that is up and can serve it, or null.

In a shared daemon the front uses this table; each owner's gateway has a table of that owner's versions:
`gateway/owners/UID/table.json`, which that user may read, in a directory of the daemon's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lorad.daemon.context import Context, request_of
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.user_files import passable
from lorad.daemon.queue.setups import base_of
from lorad.daemon.runs.versions import name_of
from lorad.daemon.serving.gateways import owners_known, owners_wanted
from lorad.errors import LoradError, StorageError
from lorad.files import write_whole
from lorad.store import aliases, runs
from lorad.store.rows import RunRow, VersionRow
from lorad.store.versions import held_versions

FILE = "table.json"


def keep_table(ctx: Context) -> None:
    """Write it when pins, aliases or pools changed since, and when it is gone."""
    if ctx.serving.table != ctx.serving.served or not (ctx.home.gateway / FILE).is_file():
        write_table(ctx)


def write_table(ctx: Context) -> None:
    """Write the gateways' table to disk. Raises StorageError; the next pass tries again."""
    served = ctx.serving.served
    try:
        ctx.home.gateway.mkdir(exist_ok=True, mode=0o700)
        told = table(ctx)
        for uid in owners_known(ctx) | owners_wanted(ctx):
            tell_owner(ctx, uid, told)
        write_json(ctx.home.gateway / FILE, told)
    except OSError as error:
        where = error.filename2 or error.filename or ctx.home.gateway  # for a rename, its target
        raise StorageError(
            f"{where}: {error.strerror}", hint="The gateway uses its old table until then."
        ) from error
    ctx.serving.table = served


def table(ctx: Context) -> dict[str, Any]:
    by_run: dict[str, list[VersionRow]] = {}
    for version in held_versions(ctx.store):
        by_run.setdefault(version.run, []).append(version)
    found: dict[str, Any] = {}
    for name, versions in by_run.items():
        found |= entries(ctx, runs.get(ctx.store, name), versions)
    return {
        "aliases": {row.alias: name_of(row) for row in aliases.aliases(ctx.store)},
        "versions": found,
    }


def entries(ctx: Context, run: RunRow, versions: list[VersionRow]) -> dict[str, Any]:
    """Make the table's entries for versions of one run; none when the run's files cannot be read."""
    try:
        about = {
            "model_path": request_of(run).model_path,
            "owner_uid": run.owner_uid,
            "socket": socket_of(ctx, run),
        }
    except (OSError, msgspec.MsgspecError, LoradError):
        return {}
    keys = ("run", "version", "sha256", "path", "created_at")
    return {name_of(version): {key: getattr(version, key) for key in keys} | about for version in versions}


def socket_of(ctx: Context, run: RunRow) -> str | None:
    base, ready = base_of(ctx, run), (pool for pool in ctx.pools.values() if pool.state == "ready")
    return next((pool.setup.socket for pool in ready if base is not None and pool.setup.serves(base)), None)


def tell_owner(ctx: Context, uid: int, told: dict[str, Any]) -> None:
    """Write an owner's part of the table to their gateway, unless it has it. Raises OSError."""
    versions = {name: about for name, about in told["versions"].items() if about["owner_uid"] == uid}
    names = {alias: name for alias, name in told["aliases"].items() if name in versions}
    data = msgspec.json.encode({"aliases": names, "versions": versions})
    if ctx.serving.tables.get(uid) == data:
        return
    directory = ctx.home.gateway_of(uid)
    passable(directory.parent, directory)
    write_whole(directory / FILE, data, mode=0o400, uid=uid)
    ctx.serving.tables[uid] = data
