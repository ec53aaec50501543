"""List aliases, move them to other versions, and remove them."""

import time

from lorad.daemon.access import find_alias, must_move, must_own, of_alias, owns, seen_aliases, seen_by_run
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import on_behalf
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.runs.versions import await_files, check_files, find_version, in_hand, is_loaded
from lorad.daemon.services.gateway import gateway_up
from lorad.daemon.serving.borrow_pool import hold_pool, is_chat, load
from lorad.daemon.serving.table import write_table
from lorad.daemon.serving.traffic import traffic_of
from lorad.errors import LoradError, SpecError, StorageError
from lorad.protocol.listener import user_name
from lorad.records.requests import SwapRequest
from lorad.records.versions import Alias, AliasMove, RemovedAlias, ServedAlias, Swapped, Verdict
from lorad.store import aliases, runs
from lorad.store.rows import VersionRow
from lorad.store.versions import get_version, held_versions


async def list_aliases(ctx: Context, call: Call) -> list[ServedAlias]:
    """List the aliases that the caller may see, what they serve, and the requests that their gateway had."""
    rows = seen_aliases(ctx, call.caller)
    names = {uid: user_name(uid) for uid in {row.owner_uid for row in rows}}
    served = {version.name: version for version in held_versions(ctx.store)}
    traffic = await traffic_of(ctx, rows)
    before = {alias: f"{run}@{version}" for alias, (run, version) in aliases.rollbacks(ctx.store).items()}
    return [
        of_row(
            ServedAlias,
            row,
            owner=names[row.owner_uid],
            step=None if (version := served.get(row.serves)) is None else version.step,
            traffic=traffic[row.alias],
            previous=before.get(row.alias),
            loaded=version is not None and is_loaded(ctx, version),
        )
        for row in rows
    ]


async def list_moves(ctx: Context, call: Call) -> list[AliasMove]:
    """List who moved an alias, when, and to what, newest first. Raises NotFound if it never existed."""
    alias = call.request.match_info["alias"]
    moves = seen_by_run(ctx, call.caller, await ctx.read(aliases.moves, alias))
    if not moves and find_alias(ctx, call.caller, alias) is None:
        raise aliases.missing(alias)
    return moves


async def swap(ctx: Context, call: Call) -> Swapped:
    """Load, attest and keep a version, then move the alias to it in one transaction.

    Raises NotFound, SpecError, Conflict, IntegrityError, AdapterRefused, AttestationFailed, PoolLost: then
    the alias serves the version from before. Swaps of one alias go one after another.
    """
    body = call.json(SwapRequest)
    alias = call.request.match_info["alias"]
    started = time.monotonic()
    aliases.check_name(alias)
    if body.rollback == (body.version is not None):
        hint = f"`lorad swap {alias} RUN@N` or `lorad swap {alias} --rollback`."
        raise SpecError("give a version, or ask for a rollback", hint=hint)
    async with ctx.serving.moving[alias]:
        before = aliases.find(ctx.store, alias)
        named = body.version
        if named is None:  # a rollback
            if find_alias(ctx, call.caller, alias) is None:
                raise aliases.missing(alias)
            named = "{}@{}".format(*aliases.before(ctx.store, alias))
        version = find_version(ctx, call.caller, named)
        run = runs.get(ctx.store, version.run)
        must_move(ctx, call.caller, alias, before, run)  # the alias may have been made while this one waited
        with in_hand(ctx, version):
            try:
                await await_files(ctx, version)
                await on_behalf(ctx, run.owner_uid, check_files, version)
                async with hold_pool(ctx, run) as pool:
                    refuse_other_base(ctx, run, pool)
                    attestation = await load(ctx, pool, version, keep=True)
                row = move(ctx, alias, version, by=call.caller)
            except LoradError as error:
                state = f"still serves {before.serves}" if before else "was not made"
                raise type(error)(f"alias {alias} {state}: {error.message}", hint=error.hint) from error
        publish_move(ctx, alias)
    seconds = time.monotonic() - started
    return of_row(
        Swapped,
        row,
        previous=before.serves if before else None,
        attestation=Verdict(attestation.verdict, attestation.detail),
        seconds=seconds,
        chat=await is_chat(ctx, run),
        **await gateway_up(ctx, call.caller),
    )


def move(ctx: Context, alias: str, version: VersionRow, *, by: Caller) -> Alias:
    """Move the alias to a version, unless it serves that already. Raises NotFound for a removed version."""
    if alias in get_version(ctx.store, version.run, version.version).aliases:
        return aliases.get(ctx.store, alias)
    return aliases.move(ctx.store, alias, version.run, version.version, by=by.name, uid=by.uid)


def publish(ctx: Context) -> None:
    """Make the gateways and pools serve what the database says now. Raises StorageError."""
    ctx.serving.served += 1
    ctx.loop.poke()
    write_table(ctx)


def publish_move(ctx: Context, alias: str) -> None:
    """Make the gateway serve new requests with the new version. Raises StorageError."""
    try:
        publish(ctx)
    except StorageError as error:
        message = f"alias {alias} has moved, but the gateway does not know yet: {error.message}"
        raise StorageError(message, hint="It learns of it as soon as the disk can be written.") from error


async def remove_alias(ctx: Context, call: Call) -> RemovedAlias:
    """End an alias. Who made it may, and so may the owner of the run that it serves, whose files it keeps.

    Raises NotFound, StorageError (the gateway has not heard of it yet), NotAllowed.
    """
    alias = call.request.match_info["alias"]
    async with ctx.serving.moving[alias]:
        row = find_alias(ctx, call.caller, alias)
        if row is None:
            raise aliases.missing(alias)
        if not owns(ctx, call.caller, runs.get(ctx.store, row.run).owner_uid):
            must_own(ctx, call.caller, of_alias(row))
        with ctx.store.write():
            aliases.remove(ctx.store, alias, by=call.caller.name)
    publish(ctx)
    return RemovedAlias(alias)
