"""Notifications: the daemon notes on disk who is to hear of what, and a process delivers it, one of the
daemon's own, in a shared daemon one of each owner, which runs as them and alone reads their secrets.

What a pass looked at and what came of it are one file (`outbox.json`), and a delivery leaves it only when its
process says so: each is made at least once, whoever dies when.
"""

import time

from msgspec.structs import replace

from lorad.alarms import alarms
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.process.as_user import as_user
from lorad.daemon.services.service import (
    OWN,
    Failure,
    Service,
    ServiceProcess,
    Upkeep,
    make_root,
    need,
    on_table,
    process_of,
    while_needed,
)
from lorad.daemon.state import RunClock
from lorad.daemon.troubles import Item
from lorad.errors import LoradError, StorageError
from lorad.notify.outbox import OLDEST, Outbox, event_of_move, load, message_of, save, with_messages, without
from lorad.notify.table import AlarmFacts, Message, NotifyTable, read_state
from lorad.protocol.tables import STATE
from lorad.states import ACTIVE, RunState
from lorad.store import events, runs
from lorad.store.rows import RunRow

_STAYS = 120.0  # seconds that a process stays when nobody needs it
_RETRIED = "It is tried again for some hours; the run is not affected."
_TOO_MANY = "more notifications in an hour than are sent: the rest is left out"


def _look(ctx: Context) -> dict[int, Upkeep]:
    """Note what is to be delivered. The process of a user is up while they have something to be delivered, or
    an active run that may soon make something. Raises StorageError.
    """
    _look_at_events(ctx)
    _look_at_alarms(ctx)
    users = {owned.uid for owned in _outbox(ctx).pending}
    users |= {run.owner_uid for run in runs.in_states(ctx.store, *ACTIVE) if spec_of(run).notify}
    need(ctx, NOTIFY, users)
    return while_needed(ctx, NOTIFY, (), seconds=_STAYS)


def _table(ctx: Context, process: ServiceProcess) -> NotifyTable:
    return NotifyTable([owned.delivery for owned in _outbox(ctx).pending if process.uid in (OWN, owned.uid)])


def _take(ctx: Context, process: ServiceProcess) -> list[Failure]:
    """Drop the deliveries that a process is done with; one that was given up becomes an event of its run."""
    pending = {owned.delivery.key: owned for owned in _outbox(ctx).pending if process.uid in (OWN, owned.uid)}
    if not pending:
        return []
    with as_user(process.user):
        state = read_state(process.work / STATE)
    given_up = {failed.key: failed.says for failed in state.given_up if failed.key in pending}
    for key, says in given_up.items():
        message = pending[key].delivery.message
        title = pending[key].delivery.to.title
        data = {"event": message.event, "to": title, "error": f"{title}: {says}", "id": message.id}
        events.append(ctx.store, message.run, "notify", data)
    if over := {*state.done, *given_up} & set(pending):
        _keep_outbox(ctx, without(_outbox(ctx), over, time.time()))
    failures = []
    for failed in state.faults:
        if owned := pending.get(failed.key):
            message = owned.delivery.message
            name = f"notify {owned.delivery.to.title} of the {message.event} of run {message.run}"
            failures.append(Failure(Item(name, owned.uid), failed.says, _RETRIED))
    return failures


NOTIFY = Service("notify", "the notifications", _look, on_table, _table, _take, _RETRIED)


def _outbox(ctx: Context) -> Outbox:
    """Return what is to be delivered, at first from disk. Raises StorageError."""
    if ctx.services.outbox is None:
        path = ctx.home.notify / "outbox.json"
        try:
            ctx.services.outbox = load(path)
        except OSError as error:
            hint = "Mend what keeps it from being read."
            raise StorageError(f"{path}: {error.strerror}", hint=hint) from None
        except ValueError:
            hint = "Remove it; notifications that were not delivered are lost."
            raise StorageError(f"{path} is damaged", hint=hint) from None
    return ctx.services.outbox


def _keep_outbox(ctx: Context, outbox: Outbox) -> None:
    """Write the outbox down if more than its cursor changed. Raises StorageError; then it is as before."""
    before = _outbox(ctx)
    if replace(outbox, cursor=before.cursor) != before:
        try:
            make_root(ctx, process_of(ctx, NOTIFY))
            save(ctx.home.notify / "outbox.json", outbox)
        except OSError as error:
            where = error.filename or ctx.home.notify
            raise StorageError(f"{where}: {error.strerror}", hint=_RETRIED) from error
    ctx.services.outbox = outbox


def _look_at_events(ctx: Context) -> None:
    """Note who is to hear of the starts and ends since the last look."""
    newest = events.last_id(ctx.store)
    outbox = _outbox(ctx)
    if newest < outbox.cursor:  # the database was made anew
        outbox = replace(outbox, cursor=0)
    while outbox.cursor < newest:
        moves = events.moves_after(ctx.store, outbox.cursor)
        recent = [move for move in moves if move.at > time.time() - OLDEST and event_of_move(move.data)]
        names = {move.run for move in recent if move.run}
        rows = {run.name: run for run in runs.named(ctx.store, list(names))}
        for move in recent:
            run = rows.get(move.run or "")
            if run is not None and move.id >= events.first_id(ctx.store, run.name):
                detail = move.data.get("detail") or ""
                facts = {"state": move.data["state"], "reason": move.data.get("reason"), "detail": detail}
                message = message_of(event_of_move(move.data), move.at, _facts(run) | facts)
                outbox = _post(ctx, outbox, run, [message])
        outbox = replace(outbox, cursor=moves[-1].id if moves else newest)
        _keep_outbox(ctx, outbox)


def _look_at_alarms(ctx: Context) -> None:
    """Note who is to hear of what is wrong now.

    How long a run has been quiet is measured by the monotonic clock from its newest step on, as the clock on
    the wall may be set meanwhile.
    """
    now = time.time()
    ahead = now - time.monotonic()
    outbox = _outbox(ctx)
    clocks: dict[str, RunClock] = {}
    for run in runs.in_states(ctx.store, RunState.RUNNING):
        if not any({"alarm", "look"} & {*to.events} for to in spec_of(run).notify or []):
            continue
        clock = ctx.services.clocks.get(run.name)
        if clock is None or (clock.attempt, clock.step) != (run.attempt, run.step):
            clock = RunClock(run.attempt, run.step, ahead)
        clocks[run.name] = clock
        messages = []
        for alarm in alarms([run], ctx.config.alarms, clock.ahead + time.monotonic()):
            facts = AlarmFacts(alarm.level, alarm.kind, alarm.says)
            messages.append(message_of("alarm", now, _facts(run), facts))
        outbox = _post(ctx, outbox, run, messages)
    ctx.services.clocks = clocks
    _keep_outbox(ctx, outbox)


def _post(ctx: Context, outbox: Outbox, run: RunRow, messages: list[Message]) -> Outbox:
    """Add messages for the receivers of a run; an event names each that is one too many."""
    receivers = spec_of(run).notify or []
    if not receivers or not messages:
        return outbox
    try:
        cwd = request_of(run).cwd
    except LoradError:
        cwd = "/"
    outbox, left_out = with_messages(outbox, run.owner_uid, receivers, messages, cwd)
    for message in left_out:
        events.append(ctx.store, run.name, "notify", {"event": message.event, "to": "", "error": _TOO_MANY})
    return outbox


def _facts(run: RunRow) -> dict[str, object]:
    same = ("owner", "step", "steps", "attempt", "version", "reward")
    others = {"run": run.name, "loss": run.signals.loss, "eval": run.eval_last, "state": str(run.state)}
    return {key: getattr(run, key) for key in same} | others
