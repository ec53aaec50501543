"""The processes that write figures of runs to experiment loggers: one of the daemon's own, in a shared daemon
one of each owner, which runs as them and alone reads their keys.

A run is followed from its first attempt until it is over and all of it is written. No run waits for a logger,
and none notices when one fails, which is a trouble of the daemon.
"""

import time

from lorad.daemon.context import Context, spec_of
from lorad.daemon.process.as_user import as_user
from lorad.daemon.services.service import (
    OWN,
    Failure,
    Service,
    ServiceProcess,
    Upkeep,
    on_table,
    while_needed,
)
from lorad.daemon.troubles import Item
from lorad.loggers.table import FollowedRun, LoggersTable, read_state
from lorad.protocol.tables import STATE
from lorad.states import ACTIVE
from lorad.store import runs

_SHARED_FILES = "~/lorad"  # in the home of the user whose process it is
_RETRIED = "It is tried again; the run is not affected, and nothing is lost."


def _look(ctx: Context) -> dict[int, Upkeep]:
    """Note which runs are to be followed: at first all with loggers, then each that becomes active, until it
    is removed. The process of an owner is up while runs of theirs are followed.
    """
    active = {run.name: run for run in runs.in_states(ctx.store, *ACTIVE) if spec_of(run).loggers}
    is_first = ctx.services.followed is None
    followed = ctx.services.followed or {}
    left = [name for name, (_, run) in followed.items() if not run.is_over and name not in active]
    over = runs.with_loggers(ctx.store) if is_first else runs.named(ctx.store, left) if left else []
    for name in left:
        followed.pop(name)
    for run in (*over, *active.values()):
        specs = [*(spec_of(run).loggers or [])]
        facts = FollowedRun(run.name, run.directory, specs, is_over=run.name not in active)
        followed[run.name] = run.owner_uid, facts
    ctx.services.followed = followed
    return while_needed(ctx, LOGGERS, {uid for uid, _ in followed.values()}, seconds=0.0)


def _table(ctx: Context, process: ServiceProcess) -> LoggersTable:
    """Make the table of the runs that a process follows; the one that it has where nothing changed."""
    rows = (ctx.services.followed or {}).values()
    followed = [run for owner, run in rows if process.uid in (OWN, owner)]
    before = ctx.services.tables.get((LOGGERS.name, process.uid))
    if isinstance(before, LoggersTable) and before.runs == followed:
        return before
    home = str(ctx.home.root) if process.user is None else _SHARED_FILES
    return LoggersTable(time.time_ns(), home, followed)


def _take(ctx: Context, process: ServiceProcess) -> list[Failure]:
    """Forget the runs that are over and written, if the process goes by the table that it was given last."""
    table = _table(ctx, process)
    with as_user(process.user):
        state = read_state(process.work / STATE)
    if ctx.services.followed is not None and state.number == table.number:
        for name in {run.run for run in table.runs if run.is_over}.intersection(state.done):
            ctx.services.followed.pop(name)
    return [
        Failure(Item(f"{fault.logger} of run {fault.run}", process.uid), fault.says, fault.hint or _RETRIED)
        for fault in state.faults
    ]


LOGGERS = Service("loggers", "the loggers", _look, on_table, _table, _take, _RETRIED)
