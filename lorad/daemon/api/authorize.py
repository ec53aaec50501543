"""Check whether a caller may make a request: each route needs some access to what its path names."""

from __future__ import annotations

from lorad.daemon.access import Access, Subject, is_admin, must_be_admin, of_alias, of_run, refuse
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.runs.versions import find_version
from lorad.store import aliases, runs


def authorize(ctx: Context, call: Call, access: Access) -> None:
    """Raises NotAllowed, NotFound.

    What only the body names is left to the handler: `must_own`, `must_see`.
    """
    if not ctx.users.shared or access is Access.ANY or is_admin(ctx, call.caller):
        return
    if access is Access.ADMIN:
        must_be_admin(ctx, call.caller)
    if (subject := subject_of(ctx, call)) is not None:
        refuse(ctx, call.caller, subject, access)


def subject_of(ctx: Context, call: Call) -> Subject | None:
    """Find what a request is about; None when it is no single thing, or an alias or pool that does not exist.

    Where the path names something, a `run` of the query means nothing: anybody may write one there. Raises
    NotFound.
    """
    named = call.request.match_info
    if run := named.get("run") or (None if named else call.text("run")):
        return of_run(runs.get(ctx.store, run))
    if version := named.get("version"):
        return of_run(runs.get(ctx.store, find_version(ctx, version).run))
    if alias := aliases.find(ctx.store, named.get("alias", "")):
        return of_alias(alias)
    pool = ctx.pools.get(named.get("pool", ""))
    return Subject(f"pool {pool.id}", pool.setup.owner) if pool else None
