"""Move an alias to another version: loaded, attested and kept first, then moved in one transaction."""

from __future__ import annotations

import time

from msgspec import Struct

from lorad.bounds import ALIASES, FOREIGN_ALIASES
from lorad.client.shapes import Swapped, Verdict
from lorad.daemon.access import is_admin, must_own, must_see, of_alias
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import on_behalf
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.runs.versions import await_files, check_files, find_version, in_hand, name_of
from lorad.daemon.serving.borrow_pool import guest, load
from lorad.daemon.serving.gateways import base_url, gateway_socket, gateway_up
from lorad.daemon.serving.table import write_table
from lorad.errors import Conflict, LoradError, SpecError, StorageError
from lorad.protocol.calls import Attestation
from lorad.store import aliases, runs
from lorad.store.rows import AliasRow, RunRow, VersionRow
from lorad.store.versions import get_version


class Body(Struct):
    """The body of a request to move an alias.

    rollback: take the version that the alias served before the present one, instead of `version`.
    """

    version: str | None = None
    rollback: bool = False


async def handle(ctx: Context, call: Call) -> Swapped:
    """Raises NotFound, SpecError, Conflict, IntegrityError, AdapterRefused, AttestationFailed, PoolLost: then
    the alias serves what it served. Swaps of one alias go one after another.
    """
    body, alias, started = call.json(Body), call.request.match_info["alias"], time.monotonic()
    aliases.check_name(alias)
    async with ctx.serving.moving[alias]:
        before, version = aliases.find(ctx.store, alias), wanted(ctx, alias, body)
        must_own(ctx, call.caller, *([of_alias(before)] if before else []))  # made while this one waited
        must_see(ctx, call.caller, run := runs.get(ctx.store, version.run))
        refuse_many(ctx, call.caller, alias, run)
        with in_hand(ctx, version):
            try:
                attestation = await prepare(ctx, version)
                row = move(ctx, alias, version, by=call.caller)
            except LoradError as error:
                kept = (
                    f"alias {alias} still serves {name_of(before)}"
                    if before
                    else f"alias {alias} was not made"
                )
                raise type(error)(f"{kept}: {error.message}", hint=error.hint) from error
        tell_gateway(ctx, alias)
    seconds = time.monotonic() - started
    await gateway_up(ctx)
    return of_row(
        Swapped,
        row,
        previous=name_of(before) if before else None,
        attestation=Verdict(attestation.verdict, attestation.detail),
        seconds=seconds,
        gateway=gateway_socket(ctx),
        url=base_url(ctx),
    )


def wanted(ctx: Context, alias: str, body: Body) -> VersionRow:
    """Find the version to serve. Raises NotFound; SpecError for both or neither of version and rollback."""
    if body.rollback == (body.version is not None):
        hint = f"`lorad swap {alias} RUN@N` or `lorad swap {alias} --rollback`."
        raise SpecError("give a version, or ask for a rollback", hint=hint)
    if body.version is not None:
        return find_version(ctx, body.version)
    return get_version(ctx.store, *aliases.before(ctx.store, alias))


def refuse_many(ctx: Context, caller: Caller, alias: str, run: RunRow) -> None:
    """Raises Conflict where a user of a shared daemon has as many aliases as one may have, in all or of
    versions of others."""
    if is_admin(ctx, caller):
        return
    mine = [row for row in aliases.aliases(ctx.store) if row.owner_uid == caller.uid and row.alias != alias]
    foreign = [row for row in mine if runs.get(ctx.store, row.run).owner_uid != caller.uid]
    if len(mine) >= ALIASES or (run.owner_uid != caller.uid and len(foreign) >= FOREIGN_ALIASES):
        count = f"{len(mine)} aliases, {len(foreign)} of them for versions of others"
        hint = f"{ALIASES} and {FOREIGN_ALIASES} are the most; `lorad aliases NAME --remove` ends one."
        raise Conflict(f"{caller.name} has {count}", hint=hint)


async def prepare(ctx: Context, version: VersionRow) -> Attestation:
    """Verify the version's files and load it into a pool of its base."""
    await await_files(ctx, version)
    run = runs.get(ctx.store, version.run)
    await on_behalf(ctx, run.owner_uid, check_files, version)
    async with guest(ctx, run) as pool:
        refuse_other_base(ctx, run, pool)
        return await load(ctx, pool, version, keep=True)


def move(ctx: Context, alias: str, version: VersionRow, *, by: Caller) -> AliasRow:
    """Alias, its log, event and the daemon's journal: all or none.

    Nothing happens where it serves that version.
    """
    run, number = version.run, version.version
    with ctx.store.write():
        get_version(ctx.store, run, number)
        before = aliases.find(ctx.store, alias)
        if before and (before.run, before.version) == (run, number):
            return before
        row = aliases.move(ctx.store, alias, run, number, by=by.name, uid=by.uid)
        ctx.journal.append(
            "alias", run, by.name, alias=alias, version=number, previous=before and name_of(before)
        )
    return row


def tell_gateway(ctx: Context, alias: str) -> None:
    """Make the gateway serve new requests with the new version; `serving/keep_loaded.py` unloads the one
    before.
    """
    ctx.serving.served += 1
    ctx.loop.poke()
    try:
        write_table(ctx)
    except StorageError as error:
        told = f"alias {alias} has moved, but the gateway does not know yet: {error.message}"
        raise StorageError(told, hint="It learns of it as soon as the disk can be written.") from error
