"""What the gateway serves under which name: `gateway/table.json`, replaced as a whole.

{aliases: {alias: "run@12"}, versions: {"run@12": {run, version, sha256, path, model_path, chat_template, socket}}}: all
versions that are pinned or aliased. socket: of a pool that is up and can serve it, or null.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lorad.daemon.context import Context, request_of
from lorad.daemon.guests import fits, is_chat
from lorad.daemon.processes import write_json
from lorad.daemon.versions import name_of
from lorad.errors import LoradError, StorageError
from lorad.store import aliases, runs
from lorad.store.db import Row
from lorad.store.versions import held_versions

FILE = "table.json"


def keep_table(ctx: Context) -> None:
    """Write it when pins, aliases or pools changed since."""
    if ctx.table != ctx.served:
        write_table(ctx)


def write_table(ctx: Context) -> None:
    """On disk when this returns. Raises StorageError; it is tried again then."""
    served = ctx.served
    try:
        ctx.home.gateway.mkdir(exist_ok=True, mode=0o700)
        write_json(ctx.home.gateway / FILE, table(ctx))
    except OSError as error:
        where = error.filename or ctx.home.gateway
        raise StorageError(f"{where}: {error.strerror}", hint="The gateway goes by its old table till then.") from error
    ctx.table = served


def table(ctx: Context) -> dict[str, Any]:
    by_run: dict[str, list[Row]] = {}
    for version in held_versions(ctx.store):
        by_run.setdefault(version["run"], []).append(version)
    found: dict[str, Any] = {}
    for name, versions in by_run.items():
        found |= entries(ctx, runs.get(ctx.store, name), versions)
    return {
        "aliases": {row["alias"]: name_of(row) for row in aliases.aliases(ctx.store)},
        "versions": found,
    }


def entries(ctx: Context, run: Row, versions: list[Row]) -> dict[str, Any]:
    """Of versions of one run; none when the run's files cannot be read."""
    try:
        about = {"model_path": request_of(run).model_path, "chat_template": is_chat(ctx, run)}
        about |= {"socket": socket_of(ctx, run)}
    except (OSError, msgspec.MsgspecError, LoradError):
        return {}
    keys = ("run", "version", "sha256", "path")
    return {name_of(version): {key: version[key] for key in keys} | about for version in versions}


def socket_of(ctx: Context, run: Row) -> str | None:
    ready = (pool for pool in ctx.pools.values() if pool.state == "ready" and fits(ctx, run, pool))
    return next((pool.setup.socket for pool in ready), None)
