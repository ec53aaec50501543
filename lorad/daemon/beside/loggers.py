"""The processes that write figures of runs to experiment loggers: one of the daemon's own, in a shared daemon
one of each owner, which runs as them and alone reads their keys.

A run is followed from its first attempt until it is over and all of it is written. No run waits for a logger,
and none notices when one fails: that is a trouble of the daemon.
"""

import time
from collections.abc import Iterator

from lorad.box.paths import AttemptDir
from lorad.box.tables import STATE, TABLE, write
from lorad.daemon.beside.kept import Kept, keep, make_root, put_away
from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each
from lorad.daemon.process.as_user import as_user
from lorad.daemon.troubles import Item
from lorad.errors import StorageError
from lorad.loggers.table import Fault, Followed, State, Table, read_state
from lorad.states import ACTIVE
from lorad.store import runs
from lorad.store.rows import RunRow

_SHARED_FILES = "~/lorad"  # of the user whose process it is
_RETRIED = "It is tried again; the run is not affected, and nothing is lost."


def keep_loggers(ctx: Context) -> None:
    """Have the journals of runs with loggers followed. Trouble with one owner's process affects no other."""
    _find_runs(ctx)
    faults: list[tuple[int, Fault]] = []

    def keep_owner(ctx: Context, uid: int) -> None:
        state = _keep_process(ctx, uid)
        faults.extend((uid, fault) for fault in state.faults)

    each(ctx, keep_owner, _owners(ctx), lambda uid: Item(f"the loggers of user {uid}", uid))
    each(ctx, _report, faults, lambda told: Item(f"{told[1].logger} of run {told[1].run}", told[0]))


def _find_runs(ctx: Context) -> None:
    """Note which runs are to be followed: at first all, then those that become active. One that was removed
    is forgotten."""
    active = {run.name: run for run in runs.in_states(ctx.store, *ACTIVE) if spec_of(run).loggers}
    known = ctx.loggers.runs
    if known is None:
        known = ctx.loggers.runs = {}
        for run in runs.with_loggers(ctx.store):
            known[run.name] = run.owner_uid, _followed(run, is_over=True)
    known.update({name: (run.owner_uid, _followed(run, is_over=False)) for name, run in active.items()})
    left = [name for name, (_, run) in known.items() if not run.is_over and name not in active]
    there = {run.name: run for run in runs.named(ctx.store, left)} if left else {}
    for name in left:
        known.pop(name)
        if name in there:
            known[name] = there[name].owner_uid, _followed(there[name], is_over=True)


def _followed(run: RunRow, *, is_over: bool) -> Followed:
    return Followed(run.name, run.directory, [*(spec_of(run).loggers or [])], is_over)


def _owners(ctx: Context) -> list[int]:
    """List the users whose runs are followed, or who have a process from before; -1: the daemon's own."""
    followed = (ctx.loggers.runs or {}).values()
    if not ctx.users.shared:
        return [-1] if followed or ctx.home.loggers.is_dir() else []
    root = ctx.home.loggers / "owners"
    there = {int(path.name) for path in root.iterdir() if path.name.isdigit()} if root.is_dir() else set()
    return sorted(there | {uid for uid, _ in followed})


def _keep_process(ctx: Context, uid: int) -> State:
    """Write the table of one owner, keep their process up while it is wanted, and forget what is done.

    Returns what the process said. Raises OSError, StorageError.
    """
    known = ctx.loggers.runs or {}
    kept = _process_of(ctx, uid)
    wanted = {name: run for name, (owner, run) in known.items() if uid in (-1, owner)}
    if wanted:
        table = _write_table(ctx, uid, kept, list(wanted.values()))
        keep(ctx, kept, wanted=True)
        with as_user(kept.user):
            state = read_state(kept.work / STATE)
        if state.number != table.number:
            return State(faults=state.faults)
        for name in state.done:
            if name in wanted and wanted[name].is_over:
                known.pop(name)
        return state
    put_away(ctx, kept)
    return State()


def _write_table(ctx: Context, uid: int, kept: Kept, wanted: list[Followed]) -> Table:
    """Write whose journals are to be followed, unless it is written. Raises StorageError."""
    before = ctx.loggers.tables.get(uid)
    if before is not None and before.runs == wanted:
        return before
    files = str(ctx.home.root) if kept.user is None else _SHARED_FILES
    table = Table(time.time_ns(), files, wanted)
    try:
        make_root(kept)
        write(kept.root / TABLE, table, uid=None if kept.user is None else kept.user.uid)
    except OSError as error:
        raise StorageError(f"{error.filename or kept.root}: {error.strerror}", hint=_RETRIED) from error
    ctx.loggers.tables[uid] = table
    return table


def _process_of(ctx: Context, uid: int) -> Kept:
    """Describe the process of an owner; -1: the daemon's own."""
    user = None if uid == -1 else ctx.user(uid)
    root = ctx.home.loggers if uid == -1 else ctx.home.loggers_of(uid)
    work = root if user is None else root / "work"
    title = "loggers" if uid == -1 else f"loggers of {user.name if user else uid}"
    return Kept("loggers", title, root, work, (str(root), str(work)), {}, {}, user)


def living_loggers(ctx: Context) -> Iterator[AttemptDir]:
    """Yield the newest life of each process."""
    for uid in _owners(ctx):
        yield from _process_of(ctx, uid).lives[-1:]


def _report(ctx: Context, told: tuple[int, Fault]) -> None:
    """Raises StorageError: what a logger cannot do is a trouble for as long as it lasts."""
    raise StorageError(told[1].says, hint=told[1].hint or _RETRIED)
