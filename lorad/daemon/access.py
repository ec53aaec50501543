"""Decide who may see and do what: each route names the access that the caller must have to its subject.

A daemon of one user lets nobody else in, and its user may do everything. In a shared one (`--system`) the
owner of a run acts on the run and its versions; an alias belongs to the user who made it, a pool to the owner
of its runs. Other users may read where `sharing.read` is `all`. Admins may do everything: root, the daemon's
own user and `sharing.admins`.

What a caller may not see does not exist for them: what a caller names is looked up here, where the hidden and
the missing have the same words. Texts that mention other things, such as what a run waits for, name them for
a `Reader`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from lorad.bounds import ALIASES, FOREIGN_ALIASES
from lorad.daemon.context import Context
from lorad.daemon.event_tail import Line
from lorad.daemon.pool import Pool
from lorad.daemon.process.users import Caller
from lorad.errors import Conflict, NotAllowed
from lorad.protocol.listener import user_name
from lorad.records.measured import Result
from lorad.records.runs import Event
from lorad.records.sweeps import Sweep
from lorad.records.versions import Alias, AliasMove
from lorad.store import aliases, events, runs
from lorad.store.rows import GroupRow, QueuedRow, RunRow, RunSummary, VersionRow

_AnyRun = RunSummary | QueuedRow
OwnedRow = TypeVar("OwnedRow", bound=RunSummary | GroupRow | Sweep)
RowOfRun = TypeVar("RowOfRun", AliasMove, Alias, Event, Line, Result, VersionRow)


class Access(StrEnum):
    """How close the caller must be to the subject.

    any: everybody who may connect.
    read: a user who may see the run, version or alias; for others it does not exist.
    own: its owner and admins.
    """

    ANY = "any"
    READ = "read"
    OWN = "own"
    ADMIN = "admin"


class Subject(NamedTuple):
    """What a request is about.

    name: says what it is, for the reader who asks.
    """

    name: str
    owner_uid: int


class Reader(NamedTuple):
    """The reader of a text, which names only what they may see."""

    uid: int
    sees_all: bool

    def sees(self, owner_uid: int) -> bool:
        return self.sees_all or self.uid == owner_uid

    def name(self, run: _AnyRun) -> str:
        return run.name if self.sees(run.owner_uid) else f"a run of {run.owner}'s"

    def name_all(self, tenants: Sequence[_AnyRun]) -> str:
        """Name runs: `run a`, `runs a, b and c`, `runs a, b and 6 others`, `run a and 2 runs of ann's`."""
        names = [one.name for one in tenants if self.sees(one.owner_uid)]
        hidden = Counter(one.owner for one in tenants if not self.sees(one.owner_uid))
        parts = [f"a run of {user}'s" if n == 1 else f"{n} runs of {user}'s" for user, n in hidden.items()]
        if len(names) < 2:
            return " and ".join([*(f"run {name}" for name in names), *parts])
        last = names[-1] if len(names) <= 4 else f"{len(names) - 2} others"
        shown = ", ".join(names[: len(names) - 1 if len(names) <= 4 else 2])
        return " and ".join([f"runs {shown} and {last}", *parts])

    def name_pool(self, pool: Pool) -> str:
        owner = pool.setup.owner
        return f"pool {pool.id}" if self.sees(owner) else f"a pool of {user_name(owner)}'s"

    def served_by(self, pool: Pool) -> str:
        return f"serves {', '.join(sorted(pool.serves))}" if self.sees(pool.setup.owner) else "serves"


EVERYTHING = Reader(-1, sees_all=True)


def reader(ctx: Context, caller: Caller) -> Reader:
    return Reader(caller.uid, sees_all(ctx, caller))


def anybody(ctx: Context) -> Reader:
    """Return the reader of a text that every user of the machine can read."""
    return Reader(-1, ctx.config.sharing.read == "all")


def owner_of(ctx: Context, run: _AnyRun) -> Reader:
    """Return the reader of what is written down about a run."""
    return reader(ctx, Caller(run.owner_uid, run.owner))


def name_for(ctx: Context, run: _AnyRun, name: str) -> str:
    """Name another run as the owner of `run` may know it.

    name: the name of a run that exists or existed; "" for none.
    """
    other = runs.find(ctx.store, name) if name else None
    who = owner_of(ctx, run)
    if other is None:
        return name if who.sees_all or not name else "another run"
    return who.name(other)


def must_be_admin(ctx: Context, caller: Caller) -> None:
    """Raises NotAllowed."""
    if not is_admin(ctx, caller):
        raise NotAllowed(f"{caller.name} is no admin of this daemon", hint=f"Ask one of: {admins(ctx)}.")


def of_run(ctx: Context, caller: Caller, run: RunRow) -> Subject:
    return Subject(reader(ctx, caller).name_all([run]), run.owner_uid)


def of_alias(alias: Alias) -> Subject:
    return Subject(f"alias {alias.alias}", alias.owner_uid)


# -- what a caller names ---------------------------------------------------------------------------------
def find_run(ctx: Context, caller: Caller, name: str) -> RunRow:
    """Raises NotFound for hidden and missing runs alike, with the name that a renamed run has now."""
    owner = None if sees_all(ctx, caller) else caller.uid
    if run := runs.find(ctx.store, name, owner):
        return run
    now = events.present_name(ctx.store, name)
    if now and (renamed := runs.find(ctx.store, now, owner)):
        raise runs.missing(name, hint=f"It was renamed to {renamed.name}.")
    raise runs.missing(name)


def find_alias(ctx: Context, caller: Caller, name: str) -> Alias | None:
    """Find an alias of the caller's, or of a version that they may see; None where there is none."""
    return aliases.find(ctx.store, name, None if sees_all(ctx, caller) else caller.uid)


def find_pool(ctx: Context, caller: Caller, name: str) -> Pool | None:
    pool = ctx.pools.get(name)
    return pool if pool and sees(ctx, caller, pool.setup.owner) else None


def must_own(ctx: Context, caller: Caller, *subjects: Subject) -> None:
    """Raises NotAllowed."""
    for subject in subjects:
        if not owns(ctx, caller, subject.owner_uid):
            owner = user_name(subject.owner_uid)
            hint = f"Ask {owner}, or an admin: {admins(ctx)}. "
            hint += "What you may see, `lorad fork` makes a run of your own of."
            raise NotAllowed(f"{subject.name} belongs to {owner}; you are {caller.name}", hint=hint)


def must_own_name(ctx: Context, caller: Caller, name: str, subject: Subject) -> None:
    """Check whether the caller may put something else in the place of what has a name.

    Raises NotAllowed, and Conflict where they may not see it, which says no more than that the name is taken.
    """
    if not sees(ctx, caller, subject.owner_uid):
        raise Conflict(f"the name {name} is in use", hint="Choose another name.")
    must_own(ctx, caller, subject)


def must_move(ctx: Context, caller: Caller, alias: str, before: Alias | None, run: RunRow) -> None:
    """Check whether the caller may let an alias, which now is `before`, serve a version of the run.

    Raises NotAllowed, and Conflict where a user of a shared daemon has as many aliases as one may have, in
    all or that serve, or would roll back to, versions of others.
    """
    if is_admin(ctx, caller):
        return
    if before:
        must_own_name(ctx, caller, alias, of_alias(before))
    own = [row for row in aliases.aliases(ctx.store) if row.owner_uid == caller.uid and row.alias != alias]
    before_of = aliases.rollbacks(ctx.store)  # their files are kept as well
    foreign = []
    for row in own:
        served = [runs.find(ctx.store, name) for name in {row.run, before_of.get(row.alias, (row.run,))[0]}]
        if any(other.owner_uid != caller.uid for other in served if other is not None):
            foreign.append(row)
    if len(own) >= ALIASES or (run.owner_uid != caller.uid and len(foreign) >= FOREIGN_ALIASES):
        count = f"{len(own)} aliases, {len(foreign)} of them for versions of others"
        hint = f"{ALIASES} and {FOREIGN_ALIASES} are the most; `lorad aliases NAME --remove` ends one."
        raise Conflict(f"{caller.name} has {count}", hint=hint)


def is_admin(ctx: Context, caller: Caller) -> bool:
    return ctx.users.is_admin(caller, ctx.config.sharing)


def owns(ctx: Context, caller: Caller, owner_uid: int) -> bool:
    return caller.uid == owner_uid or is_admin(ctx, caller)


def sees(ctx: Context, caller: Caller, owner_uid: int) -> bool:
    return ctx.config.sharing.read == "all" or owns(ctx, caller, owner_uid)


def sees_all(ctx: Context, caller: Caller) -> bool:
    return ctx.config.sharing.read == "all" or is_admin(ctx, caller)


def seen(ctx: Context, caller: Caller, rows: Iterable[OwnedRow]) -> list[OwnedRow]:
    return [row for row in rows if sees(ctx, caller, row.owner_uid)]


def seen_by_run(ctx: Context, caller: Caller, rows: Iterable[RowOfRun]) -> list[RowOfRun]:
    """Keep the rows (versions, results, aliases, their moves, events) whose run the caller may see.

    Rows of a removed run have no owner, also where its name is another run's now: only callers who see
    everything get them.
    """
    if sees_all(ctx, caller):
        return list(rows)
    begun = runs.beginnings(ctx.store, caller.uid)
    visible = []
    for row in (row for row in rows if row.run in begun):
        first_event, created_at = begun[row.run]
        is_own = True  # of the run that has this name now, as `lorad/store/rename.py` tells them apart
        match row:
            case Event() | Line():
                is_own = row.id >= first_event
            case AliasMove() | Result():
                is_own = row.at >= created_at
        if is_own:
            visible.append(row)
    return visible


def seen_aliases(ctx: Context, caller: Caller) -> list[Alias]:
    """List the caller's own aliases, and those of runs that the caller may see."""
    rows = aliases.aliases(ctx.store)
    by_run = {row.alias for row in seen_by_run(ctx, caller, rows)}
    return [row for row in rows if row.alias in by_run or row.owner_uid == caller.uid]


def admins(ctx: Context) -> str:
    return ", ".join(dict.fromkeys(["root", *ctx.config.sharing.admins]))
