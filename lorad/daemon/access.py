"""Decide who may do what: each route names the access that the caller must have to its subject.

A daemon of one user lets nobody else in, and its user may do everything. In a shared one (`--system`) the
owner of a run acts on the run and its versions; an alias belongs to the user who made it, a pool to the owner
of its runs. Other users may read where `sharing.read` is `all`. Admins may do everything: root, the daemon's
own user and `sharing.admins`.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from lorad.bounds import ALIASES, FOREIGN_ALIASES
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.errors import Conflict, NotAllowed
from lorad.protocol.listener import user_name
from lorad.store import aliases, runs
from lorad.store.rows import AliasRow, RunRow


class _Owned(Protocol):
    """A row that somebody owns, as of a run or a sweep."""

    @property
    def owner_uid(self) -> int: ...


class _OfRun(Protocol):
    """A row about a run, as of a version, an alias or an event."""

    @property
    def run(self) -> str | None: ...


OwnedRow = TypeVar("OwnedRow", bound=_Owned)
RowOfRun = TypeVar("RowOfRun", bound=_OfRun)


class Access(StrEnum):
    """How close the caller must be to the subject.

    any: everybody who may connect.
    read: a user who may see the run, version or alias.
    own: its owner and admins.
    """

    ANY = "any"
    READ = "read"
    OWN = "own"
    ADMIN = "admin"


class Subject(NamedTuple):
    """What a request is about."""

    what: str
    owner_uid: int


def must_be_admin(ctx: Context, caller: Caller) -> None:
    """Raises NotAllowed."""
    if not is_admin(ctx, caller):
        raise NotAllowed(f"{caller.name} is no admin of this daemon", hint=f"Ask one of: {admins(ctx)}.")


def of_run(run: RunRow) -> Subject:
    return Subject(f"run {run.name}", run.owner_uid)


def of_alias(alias: AliasRow) -> Subject:
    return Subject(f"alias {alias.alias}", alias.owner_uid)


def refuse(ctx: Context, caller: Caller, subject: Subject, access: Access) -> None:
    """Raises NotAllowed."""
    if access is Access.READ and not sees(ctx, caller, subject.owner_uid):
        owner = user_name(subject.owner_uid)
        hint = f"Here only owners see what is theirs (sharing.read). Ask {owner}, or an admin: {admins(ctx)}."
        raise NotAllowed(f"{subject.what} belongs to {owner}", hint=hint)
    if access is Access.OWN and not owns(ctx, caller, subject.owner_uid):
        owner = user_name(subject.owner_uid)
        hint = (
            f"Ask {owner}, or an admin: {admins(ctx)}. What you may see, `lorad fork` makes a run of "
            "your own of."
        )
        raise NotAllowed(f"{subject.what} belongs to {owner}; you are {caller.name}", hint=hint)


def must_own(ctx: Context, caller: Caller, *subjects: Subject) -> None:
    """Raises NotAllowed."""
    for subject in subjects:
        refuse(ctx, caller, subject, Access.OWN)


def must_see(ctx: Context, caller: Caller, run: RunRow) -> RunRow:
    """Return the run if the caller may see it. Raises NotAllowed."""
    refuse(ctx, caller, of_run(run), Access.READ)
    return run


def must_move(ctx: Context, caller: Caller, alias: str, before: AliasRow | None, run: RunRow) -> None:
    """Check whether the caller may let an alias serve a version of the run. before: what it serves now.

    Raises NotAllowed, and Conflict where a user of a shared daemon has as many aliases as one may have, in
    all or of versions of others.
    """
    if is_admin(ctx, caller):
        return
    if before:
        must_own(ctx, caller, of_alias(before))
    must_see(ctx, caller, run)
    mine = [row for row in aliases.aliases(ctx.store) if row.owner_uid == caller.uid and row.alias != alias]
    foreign = [row for row in mine if runs.get(ctx.store, row.run).owner_uid != caller.uid]
    if len(mine) >= ALIASES or (run.owner_uid != caller.uid and len(foreign) >= FOREIGN_ALIASES):
        count = f"{len(mine)} aliases, {len(foreign)} of them for versions of others"
        hint = f"{ALIASES} and {FOREIGN_ALIASES} are the most; `lorad aliases NAME --remove` ends one."
        raise Conflict(f"{caller.name} has {count}", hint=hint)


def is_admin(ctx: Context, caller: Caller) -> bool:
    return ctx.users.is_admin(caller, ctx.config.sharing)


def owns(ctx: Context, caller: Caller, owner_uid: int) -> bool:
    return caller.uid == owner_uid or is_admin(ctx, caller)


def sees(ctx: Context, caller: Caller, owner_uid: int) -> bool:
    return ctx.config.sharing.read == "all" or owns(ctx, caller, owner_uid)


def sees_all(ctx: Context, caller: Caller) -> bool:
    """Check whether the caller sees what belongs to others."""
    return ctx.config.sharing.read == "all" or is_admin(ctx, caller)


def seen(ctx: Context, caller: Caller, rows: Iterable[OwnedRow]) -> list[OwnedRow]:
    """List the runs, or sweeps, that the caller may see."""
    return [row for row in rows if sees(ctx, caller, row.owner_uid)]


def seen_by_run(ctx: Context, caller: Caller, rows: Iterable[RowOfRun]) -> list[RowOfRun]:
    """Keep the rows (versions, aliases, events) whose run the caller may see.

    Rows of a removed run have no owner: only callers who see everything get them.
    """
    if sees_all(ctx, caller):
        return list(rows)
    mine = {*runs.names(ctx.store, owner_uid=caller.uid)}
    return [row for row in rows if row.run in mine]


def seen_aliases(ctx: Context, caller: Caller) -> list[AliasRow]:
    """List the caller's own aliases, and those of runs that the caller may see."""
    rows = aliases.aliases(ctx.store)
    by_run = {row.alias for row in seen_by_run(ctx, caller, rows)}
    return [row for row in rows if row.alias in by_run or row.owner_uid == caller.uid]


def admins(ctx: Context) -> str:
    return ", ".join(dict.fromkeys(["root", *ctx.config.sharing.admins]))
