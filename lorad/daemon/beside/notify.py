"""Notifications: the daemon notes on disk who is to hear of what, and a process delivers it, one of the
daemon's own, in a shared daemon one of each owner, which runs as them and alone reads their secrets.

What a pass looked at and what came of it are one file (`outbox.json`), and a delivery leaves it only when its
process says so: whoever dies when, each is made at least once.
"""

import time
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from lorad.alarms import alarms
from lorad.box.paths import AttemptDir
from lorad.box.tables import STATE, TABLE, write
from lorad.client.shapes import Rates, Run, Signals
from lorad.daemon.beside.kept import Kept, keep, make_root, put_away
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.guarded import each
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.user_files import passable
from lorad.daemon.state import RunClock
from lorad.daemon.troubles import Item
from lorad.errors import LoradError, StorageError
from lorad.notify.outbox import OLDEST, Outbox, load, message_of, posted, said_of_move, save, without
from lorad.notify.table import AlarmSaid, Message, Table, read_state
from lorad.states import ACTIVE, RunState
from lorad.store import events, runs
from lorad.store.rows import EventRow, RunRow

_STAYS = 120.0  # seconds that a process stays when nobody needs it
_RETRIED = "It is tried again for some hours; the run is not affected."
_DAMAGED = "Remove it; notifications that were not delivered are lost."
_TOO_MANY = "more notifications in an hour than are sent: the rest is left out"

_Fault = tuple[int, str, str]  # uid, what it is about, what is wrong


def keep_notify(ctx: Context) -> None:
    """Note what is to be delivered, and have it delivered. Trouble with one owner's process affects no
    other.

    Raises StorageError.
    """
    _look_at_events(ctx)
    _look_at_alarms(ctx)
    faults: list[_Fault] = []

    def notify_owner(ctx: Context, uid: int) -> None:
        faults.extend(_keep_process(ctx, uid))

    each(ctx, notify_owner, _owners(ctx), lambda uid: Item(f"the notifications of user {uid}", uid))
    each(ctx, _not_notified, faults, lambda fault: Item(fault[1], fault[0]))


def _not_notified(ctx: Context, fault: _Fault) -> None:
    """Raises StorageError: what cannot be delivered is a trouble for as long as it is tried."""
    raise StorageError(fault[2], hint=_RETRIED)


def _outbox(ctx: Context) -> Outbox:
    """Raises StorageError."""
    if ctx.notify.outbox is None:
        path = ctx.home.notify / "outbox.json"
        try:
            ctx.notify.outbox = load(path)
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror}", hint="Mend what keeps it from being read."
            ) from None
        except ValueError:
            raise StorageError(f"{path} is damaged", hint=_DAMAGED) from None
    return ctx.notify.outbox


def _keep_outbox(ctx: Context, outbox: Outbox) -> None:
    """Raises StorageError: then nothing of it has happened."""
    before = _outbox(ctx)
    if replace(outbox, cursor=before.cursor) != before:  # else nothing came of what was looked at
        try:
            if ctx.users.shared:
                passable(ctx.home.notify)
            else:
                ctx.home.notify.mkdir(mode=0o700, exist_ok=True)
            save(ctx.home.notify / "outbox.json", outbox)
        except OSError as error:
            raise StorageError(
                f"{error.filename or ctx.home.notify}: {error.strerror}", hint=_RETRIED
            ) from error
    ctx.notify.outbox = outbox


def _look_at_events(ctx: Context) -> None:
    """Note who is to hear of the starts and ends since the last look."""
    newest, outbox = events.last_id(ctx.store), _outbox(ctx)
    if newest < outbox.cursor:  # the database was made anew
        outbox = replace(outbox, cursor=0)
    while outbox.cursor < newest:
        moves = events.moves_after(ctx.store, outbox.cursor)
        wanted = [move for move in moves if move.at > time.time() - OLDEST and said_of_move(move.data)]
        there = {run.name: run for run in runs.named(ctx.store, list({m.run for m in wanted if m.run}))}
        for move in wanted:
            if (run := there.get(move.run or "")) and move.id >= events.first_id(ctx.store, run.name):
                outbox = _post(ctx, outbox, run, [_of_move(run, move)])
        outbox = replace(outbox, cursor=moves[-1].id if moves else newest)
        _keep_outbox(ctx, outbox)


def _look_at_alarms(ctx: Context) -> None:
    """Note who is to hear of what is wrong now."""
    outbox, now = _outbox(ctx), time.time()
    running = runs.in_states(ctx.store, RunState.RUNNING)
    asked = {
        run.name: run
        for run in running
        if any({"alarm", "look"} & {*to.events} for to in spec_of(run).notify or [])
    }
    ctx.notify.clocks = {name: _clock_of(ctx, run) for name, run in asked.items()}
    for run in asked.values():
        at = ctx.notify.clocks[run.name].ahead + time.monotonic()
        found = alarms([_as_client_sees(run)], ctx.config.alarms, at)
        said = [AlarmSaid(one.level, one.kind, one.says) for one in found]
        outbox = _post(ctx, outbox, run, [message_of("alarm", now, _facts(run), one) for one in said])
    _keep_outbox(ctx, outbox)


def _clock_of(ctx: Context, run: RunRow) -> RunClock:
    """Take the clock by which a run is quiet: the monotonic one from its newest step on, since the clock on
    the wall may be set meanwhile, which is no fault of the run.
    """
    before, now = ctx.notify.clocks.get(run.name), time.time() - time.monotonic()
    if before is not None and (before.attempt, before.step) == (run.attempt, run.step):
        return before
    return RunClock(run.attempt, run.step, now)


def _post(ctx: Context, outbox: Outbox, run: RunRow, messages: list[Message]) -> Outbox:
    receivers = spec_of(run).notify or []
    if not receivers or not messages:
        return outbox
    try:
        cwd = request_of(run).cwd
    except LoradError:
        cwd = "/"
    outbox, left_out = posted(outbox, run.owner_uid, receivers, messages, cwd)
    for one in left_out:
        events.append(ctx.store, run.name, "notify", {"event": one.event, "to": "", "error": _TOO_MANY})
    return outbox


def _of_move(run: RunRow, move: EventRow) -> Message:
    reason = move.data.get("reason")
    facts = {"state": move.data["state"], "reason": reason, "detail": move.data.get("detail") or ""}
    return message_of(said_of_move(move.data), move.at, _facts(run) | facts)


def _facts(run: RunRow) -> dict[str, object]:
    same = ("owner", "step", "steps", "attempt", "version", "reward")
    return {key: getattr(run, key) for key in same} | {
        "run": run.name,
        "loss": msgspec.json.decode(run.signals, type=Signals).loss,
        "eval": run.eval_last,
        "state": str(run.state),
    }


def _as_client_sees(run: RunRow) -> Run:
    """Make what alarms are raised from."""
    return Run(
        name=run.name,
        state=str(run.state),
        step=run.step,
        reward=run.reward,
        eval_first=run.eval_first,
        eval_last=run.eval_last,
        started_at=run.started_at,
        rates=Rates(run.rates.tokens_per_second, run.rates.step_seconds),
        signals=msgspec.json.decode(run.signals, type=Signals),
    )


def _owners(ctx: Context) -> list[int]:
    """List the users who have something to be delivered, may have soon, or have a process from before; -1:
    the daemon's own."""
    needed = {one.uid for one in _outbox(ctx).pending}
    needed |= {run.owner_uid for run in runs.in_states(ctx.store, *ACTIVE) if spec_of(run).notify}
    now = time.monotonic()
    if not ctx.users.shared:
        ctx.notify.needed_at |= {-1: now} if needed else {}
        return [-1] if needed or ctx.home.notify.is_dir() else []
    ctx.notify.needed_at |= dict.fromkeys(needed, now)
    return sorted(needed | _there(ctx))


def _there(ctx: Context) -> set[int]:
    """Return the users of whom a shared daemon has a directory."""
    root = ctx.home.notify / "owners"
    return {int(path.name) for path in root.iterdir() if path.name.isdigit()} if root.is_dir() else set()


def _keep_process(ctx: Context, uid: int) -> list[_Fault]:
    """Keep the process of one owner up while it is needed, give it what it is to deliver, and drop what it
    is done with.

    Returns what fails now. Raises OSError, StorageError.
    """
    kept = _process_of(ctx, uid)
    if ctx.notify.needed_at.get(uid, 0.0) < time.monotonic() - _STAYS:
        put_away(ctx, kept)
        return []
    mine = [one for one in _outbox(ctx).pending if uid in (-1, one.uid)]
    _write_table(ctx, uid, kept, Table([one.delivery for one in mine]))
    keep(ctx, kept, wanted=True)
    if not mine:
        return []
    with as_user(kept.user):
        state = read_state(kept.work / STATE)
    there = {one.delivery.key: one for one in mine}
    given_up = {one.key: one.says for one in state.given_up if one.key in there}
    for key, says in given_up.items():
        _note_failure(ctx, there[key].delivery.message, there[key].delivery.to.title, says)
    over = {*state.done, *given_up} & set(there)
    if over:
        _keep_outbox(ctx, without(_outbox(ctx), over, time.time()))
    faults = [(there[one.key], one.says) for one in state.faults if one.key in there]
    return [(one.uid, *_in_words(one.delivery.message, one.delivery.to.title, says)) for one, says in faults]


def _note_failure(ctx: Context, message: Message, to: str, says: str) -> None:
    data = {"event": message.event, "to": to, "error": f"{to}: {says}", "id": message.id}
    events.append(ctx.store, message.run, "notify", data)


def _in_words(message: Message, to: str, says: str) -> tuple[str, str]:
    return f"notify {to} of the {message.event} of run {message.run}", says


def _write_table(ctx: Context, uid: int, kept: Kept, table: Table) -> None:
    """Write what is to be delivered, unless it is written. Raises StorageError."""
    if ctx.notify.tables.get(uid) == table:
        return
    try:
        make_root(kept)
        write(kept.root / TABLE, table, uid=None if kept.user is None else kept.user.uid)
    except OSError as error:
        raise StorageError(f"{error.filename or kept.root}: {error.strerror}", hint=_RETRIED) from error
    ctx.notify.tables[uid] = table


def _process_of(ctx: Context, uid: int) -> Kept:
    """Describe the process of an owner; -1: the daemon's own."""
    user = None if uid == -1 else ctx.user(uid)
    root = ctx.home.notify if uid == -1 else ctx.home.notify_of(uid)
    work = root if user is None else root / "work"
    title = "notifications" if uid == -1 else f"notifications of {user.name if user else uid}"
    return Kept("notify", title, root, work, (str(root), str(work)), {}, {}, user)


def living_notifiers(ctx: Context) -> Iterator[AttemptDir]:
    """Yield the newest life of each process."""
    for uid in _there(ctx) if ctx.users.shared else [-1]:
        yield from _process_of(ctx, uid).lives[-1:]
