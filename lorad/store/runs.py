"""Runs and their attempts."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lorad.errors import Conflict, NotFound
from lorad.records.runs import Attempt
from lorad.spec.model import Spec, to_json
from lorad.states import ACTIVE, MOVES, EndReason, Move, RunState
from lorad.store import events
from lorad.store.bill import keep_removed
from lorad.store.db import Row, Rows, Store, insert_row, update_rows
from lorad.store.foreseen import forecasts
from lorad.store.rows import SUMMARY_COLUMNS, QueuedRow, RunRow, RunSummary, decode_run, run_summary

_FIELDS = {
    *("detail", "directory", "origin", "pool", "preempted", "priority", "queue_group", "restart_at"),
    *("resume_step", "serving", "spec", "steps", "sweep", "waiting", "wanted", "yielded", "tags", "note"),
}
_PLACED = {"waiting": "", "preempted": None, "yielded": None, "restart_at": None}
_RESUMED = {"reason": None, "detail": "", "wanted": None, "ended_at": None}
_SET_BY: dict[Move, Row] = {
    Move.PLACE: _PLACED,
    Move.CONFIRM: {"waiting": ""},
    Move.PAUSE: _PLACED | {"wanted": None},
    Move.END: _PLACED | {"wanted": None},
    Move.RESUME: _RESUMED,
    Move.RESTART: _RESUMED,
}
"""The columns that a move sets beside the state."""
RECENT_SECONDS = 24 * 3600.0
_SUMMARY = ", ".join(SUMMARY_COLUMNS)
_ATTEMPT = "attempt, started_at, ended_at, resumed_from, exit_code, signal, reason, detail"
_DAEMON = "daemon"  # who moves a run that nobody asked for
_AS_A_QUEUE = "priority DESC, first_event, created_at, rowid"  # a clock that is set back reorders nobody


def create(
    store: Store,
    *,
    name: str,
    owner: str,
    spec_json: str,
    directory: str,
    steps: int,
    priority: int,
    owner_uid: int | None = None,
) -> RunRow:
    """Create a queued run, and its event. Raises Conflict when the name is in use.

    owner_uid: by default the user of this process.

    Attempts count on from a removed or renamed run of the same name, because a pool identifies callers by
    name and attempt.
    """
    with store.write() as connection:
        if exists(store, name):
            raise Conflict(f"there is a run named {name}", hint=f"Choose another name, or `lorad rm {name}`.")
        about = {"from": None, "state": RunState.QUEUED, "by": owner}
        sql = (
            "SELECT max(json_extract(data, '$.attempt')) AS attempt FROM events WHERE run = ? "
            "AND kind IN ('removed', 'renamed')"
        )
        (last_attempt,) = store.tuples(sql, (name,))[0]
        row = {
            "first_event": events.add(connection, name, "state", about),
            "name": name,
            "owner": owner,
            "owner_uid": os.getuid() if owner_uid is None else owner_uid,
            "state": RunState.QUEUED,
            "spec": spec_json,
            "directory": directory,
            "priority": priority,
            "steps": steps,
            "created_at": time.time(),
            "attempt": last_attempt or 0,
        }
        insert_row(connection, "runs", row)
        return get(store, name)


def exists(store: Rows, name: str) -> bool:
    """Check whether there is a run of that name."""
    return store.row("SELECT 1 FROM runs WHERE name = ?", (name,)) is not None


def name_in_use(store: Rows, name: str) -> str | None:
    """Find the run with this name, or with one that differs only in capitals."""
    row = store.row("SELECT name FROM runs WHERE name = ? COLLATE NOCASE", (name,))
    return None if row is None else str(row["name"])


def find(store: Rows, name: str, owner_uid: int | None = None) -> RunRow | None:
    """Find a run, only among those of one owner where `owner_uid` is given."""
    which = "WHERE name = ?1 AND (?2 IS NULL OR owner_uid = ?2)"
    return next(iter(_select(store, which, (name, owner_uid))), None)


def _select(store: Rows, which: str, parameters: Sequence[Any] = ()) -> list[RunRow]:
    return [decode_run(RunRow, row) for row in store.rows(f"SELECT * FROM runs {which}", parameters)]


def get(store: Rows, name: str) -> RunRow:
    """Read a run. Raises NotFound."""
    row = find(store, name)
    if row is None:
        raise missing(name)
    return row


def missing(name: str, hint: str = "`lorad list --all` shows every run.") -> NotFound:
    """Make the error that a run does not exist."""
    return NotFound(f"no run named {name}", hint=hint)


def beginnings(store: Rows, owner_uid: int) -> dict[str | None, tuple[int, float]]:
    """Find the first event of each run of one owner, and its time. What is older belongs to a namesake."""
    sql = "SELECT name, first_event, created_at FROM runs WHERE owner_uid = ?"
    return {name: (first, created) for name, first, created in store.tuples(sql, (owner_uid,))}


def names(store: Rows, *, owner_uid: int | None = None) -> list[str]:
    """List the names of all runs, or of one owner's, oldest first."""
    where, values = ("", ()) if owner_uid is None else ("WHERE owner_uid = ?", (owner_uid,))
    rows = store.tuples(f"SELECT name FROM runs {where} ORDER BY created_at, rowid", values)
    return [name for (name,) in rows]


def every(store: Rows) -> list[RunRow]:
    """List all runs, oldest first."""
    return _select(store, "ORDER BY created_at, rowid")


def count_by_state(store: Rows) -> dict[RunState, int]:
    """Count the runs in each state that has any."""
    rows = store.tuples("SELECT state, count(*) FROM runs GROUP BY state")
    return {RunState(state): count for state, count in rows}


def directories(store: Rows) -> dict[int, list[Path]]:
    """Find the directories of all runs, by the uid of their owner."""
    directories: dict[int, list[Path]] = {}
    for row in store.rows("SELECT owner_uid, directory FROM runs"):
        directories.setdefault(row["owner_uid"], []).append(Path(row["directory"]))
    return directories


def names_first_ended(store: Rows, limit: int) -> list[str]:
    """List the runs that ended first and do not serve."""
    sql = "SELECT name FROM runs WHERE state = 'ended' AND serving = 0 ORDER BY ended_at LIMIT ?"
    return [name for (name,) in store.tuples(sql, (limit,))]


def pools_in_use(store: Rows) -> set[str]:
    """List the pools of runs that have not ended or that serve."""
    sql = "SELECT pool FROM runs WHERE pool IS NOT NULL AND (ended_at IS NULL OR serving = 1)"
    return {pool for (pool,) in store.tuples(sql)}


def owners_of_aliased(store: Rows) -> dict[str, int]:
    """Find the uid of the owner of each run that an alias serves a version of."""
    return dict(store.tuples("SELECT name, owner_uid FROM runs WHERE name IN (SELECT run FROM aliases)"))


def owners_served(store: Rows) -> set[int]:
    """List the uids of users who have an alias, a pinned version, or a run that serves."""
    sql = """
    SELECT owner_uid FROM runs WHERE serving = 1 OR name IN (SELECT run FROM aliases)
    OR name IN (SELECT run FROM versions WHERE pinned = 1)
    """
    return {uid for (uid,) in store.tuples(sql)}


def list_named(store: Rows, names: Sequence[str]) -> list[RunSummary]:
    """List the runs that exist among `names`, newest first."""
    marks = ", ".join("?" for _ in names)
    sql = f"SELECT {_SUMMARY} FROM runs WHERE name IN ({marks}) ORDER BY created_at DESC, rowid DESC"
    return [run_summary(values) for values in store.tuples(sql, tuple(names))]


def count_listed(store: Rows, *, all: bool) -> int:
    """Count the runs that `list_runs` lists without a limit."""
    since = 0.0 if all else time.time() - RECENT_SECONDS
    sql = "SELECT count(*) AS n FROM runs WHERE ended_at IS NULL OR ended_at >= ?"
    return int(store.rows(sql, (since,))[0]["n"])


def list_runs(store: Rows, *, all: bool, limit: int = 0) -> list[RunSummary]:
    """List runs, newest first; without `all`, only those that have not ended or ended in the last day.

    limit: how many runs at most, though those that have not ended are always listed; 0 is no limit.
    """
    since = 0.0 if all else time.time() - RECENT_SECONDS
    sql = f"SELECT created_at, rowid, {_SUMMARY} FROM runs WHERE"
    order = "ORDER BY created_at DESC, rowid DESC"
    others = store.tuples(f"{sql} ended_at IS NULL {order}")
    most = max(0, limit - len(others)) if limit else -1
    ended = store.tuples(f"{sql} ended_at >= ? {order} LIMIT ?", (since, most))
    newest_first = sorted([*others, *ended], key=lambda values: values[:2], reverse=True)
    return [run_summary(values[2:]) for values in newest_first]


def in_states(store: Rows, *states: RunState) -> list[RunRow]:
    """List the runs in these states as a queue: highest priority first, then oldest first."""
    marks = ", ".join("?" for _ in states)
    return _select(store, f"WHERE state IN ({marks}) ORDER BY {_AS_A_QUEUE}", states)


def with_loggers(store: Rows) -> list[RunRow]:
    """List the runs whose spec names loggers."""
    return _select(store, "WHERE json_array_length(spec, '$.loggers') > 0 ORDER BY created_at, rowid", ())


def active_in(store: Rows, pool: str) -> list[RunRow]:
    """List the active runs of a pool: highest priority first, then oldest first."""
    marks = ", ".join("?" for _ in ACTIVE)
    which = f"WHERE pool = ? AND state IN ({marks}) ORDER BY {_AS_A_QUEUE}"
    return _select(store, which, (pool, *ACTIVE))


def named(store: Rows, names: Sequence[str]) -> list[RunRow]:
    """Read the runs that exist among `names`, in that order."""
    marks = ", ".join("?" for _ in names)
    runs = {run.name: run for run in _select(store, f"WHERE name IN ({marks})", tuple(names))}
    return [runs[name] for name in names if name in runs]


def queue(store: Rows) -> list[QueuedRow]:
    """List the queued runs: highest priority first, then oldest first."""
    columns = "name, owner_uid, priority, waiting, owner"
    sql = f"SELECT {columns} FROM runs WHERE state = 'queued' ORDER BY {_AS_A_QUEUE}"
    return [QueuedRow(*values) for values in store.tuples(sql)]


def latest_starts(store: Rows) -> dict[int, float]:
    """Find the Unix time at which the newest attempt of each owner began, by uid."""
    sql = """
    SELECT owner_uid, max(attempts.started_at) FROM attempts JOIN runs ON runs.name = attempts.run
    GROUP BY owner_uid
    """
    return dict(store.tuples(sql))


def restarts(store: Rows, name: str) -> int:
    """Count how often the daemon has restarted a run since a user started or resumed it."""
    sql = """
    WITH moves AS (
      SELECT e.id, json_extract(e.data, '$.move') AS move, json_extract(e.data, '$.by') AS "by"
      FROM events e JOIN runs r ON r.name = e.run WHERE e.run = ?
      AND e.kind = 'state' AND e.id >= r.first_event
    )
    SELECT count(*) AS made FROM moves WHERE move = ? AND id > coalesce(
      (SELECT max(id) FROM moves WHERE move = ? AND "by" != ?), 0
    )
    """
    (row,) = store.rows(sql, (name, Move.RESTART, Move.RESUME, _DAEMON))
    return int(row["made"])


def that_serve(store: Rows) -> list[RunRow]:
    """List the runs for which a pool is kept up, oldest first."""
    return _select(store, "WHERE serving = 1 ORDER BY created_at, rowid")


def move(
    store: Store,
    name: str,
    move: Move,
    *,
    expect: RunState | None = None,
    reason: EndReason | None = None,
    detail: str = "",
    by: str = _DAEMON,
    also: Row | None = None,
) -> RunRow:
    """Make one move of `lorad.states.MOVES` and append its event, both or neither. Returns the new row.

    also: columns of the run that are set with the move.

    `reason` belongs to END and to nothing else (ValueError). Raises NotFound, and Conflict when the move is
    not allowed from the present state or that state is not `expect`.
    """
    if (move is Move.END) != (reason is not None):
        raise ValueError(f"{move}: a run ends with a reason, and only then")
    with store.write() as connection:
        before = RunState(get(store, name).state)
        to = MOVES[move].get(before)
        if to is None or expect not in (None, before):
            message = f"run {name} is {before}: {move} is not possible"
            if expect not in (None, before):
                message = f"run {name} is {before}, not {expect}"
            allowed = [str(possible) for possible, moves in MOVES.items() if before in moves]
            raise Conflict(f"{message}; possible now: {', '.join(allowed)}")
        changes: Row = {"state": to, **_SET_BY.get(move, {})}
        if move in (Move.PAUSE, Move.END):
            changes["detail"] = detail
        if move is Move.END:
            changes |= {"reason": reason, "ended_at": time.time()}
        update_rows(connection, "runs", changes | (also or {}), name=name)
        if move is Move.PLACE:
            sql = "UPDATE runs SET started_at = coalesce(started_at, ?) WHERE name = ?"
            connection.execute(sql, (time.time(), name))
        about = {"from": before, "state": to, "by": by, "move": move, "reason": reason, "detail": detail}
        events.add(connection, name, "state", about)
        return get(store, name)


def set_fields(store: Store, name: str, **columns: Any) -> None:
    """Set columns of `_FIELDS` in the row of a run, without an event. Raises NotFound, ValueError."""
    if unknown := set(columns) - _FIELDS:
        raise ValueError(f"not to be set here: {', '.join(sorted(unknown))}")
    with store.write() as connection:
        if not update_rows(connection, "runs", columns, name=name):
            get(store, name)


def set_labels(store: Store, name: str, tags: Sequence[str], note: str) -> None:
    """Set the tags and the note of a run."""
    set_fields(store, name, tags=msgspec.json.encode(tags).decode(), note=note)


def respecify(store: Store, name: str, spec: Spec) -> None:
    """Give a run another spec, and set the columns that follow from it. Raises NotFound."""
    columns = {"priority": spec.resources.priority, "queue_group": spec.resources.group}
    set_fields(store, name, spec=to_json(spec).decode(), steps=spec.planned_steps, **columns)


def remove(store: Store, name: str, *, by: str = "daemon") -> None:
    """Forget a run with all its rows, and a sweep with its last run. Events and bill stay.

    Raises NotFound, and Conflict while it works or one of its versions is aliased or pinned.
    """
    with store.write() as connection:
        state = RunState(get(store, name).state)
        if not state.is_over:
            hint = f"`lorad stop {name}` or `lorad kill {name}` first."
            raise Conflict(f"run {name} is {state}", hint=hint)
        refuse_held(store, name)
        row = get(store, name)
        ((newest,),) = store.tuples("SELECT max(version) FROM versions WHERE run = ?", (name,))
        keep_removed(store, connection, name)
        connection.execute("DELETE FROM runs WHERE name = ?", (name,))
        is_empty = "NOT EXISTS (SELECT 1 FROM runs WHERE runs.sweep = sweeps.sweep)"
        connection.execute(f"DELETE FROM sweeps WHERE sweep = ? AND {is_empty}", (row.sweep,))
        events.add(connection, name, "removed", {"by": by, "attempt": row.attempt, "version": newest})


def refuse_held(store: Rows, name: str) -> None:
    """Raise Conflict while a version of a run is aliased or pinned."""
    sql = """SELECT alias, (aliases.owner_uid <> runs.owner_uid) AS is_foreign,
    (SELECT "by" FROM alias_moves m WHERE m.alias = aliases.alias ORDER BY id DESC LIMIT 1) AS "by"
    FROM aliases JOIN runs ON runs.name = aliases.run WHERE run = ? ORDER BY alias"""
    if aliases := store.rows(sql, (name,)):
        names = ", ".join(row["alias"] + (f" of {row['by']}" if row["is_foreign"] else "") for row in aliases)
        serve = f"alias {names} serves" if len(aliases) == 1 else f"aliases {names} serve"
        first = aliases[0]["alias"]
        hint = f"`lorad swap {first} RUN@N` moves it, `lorad aliases {first} --remove` ends it."
        raise Conflict(f"{serve} a version of run {name}", hint=hint)
    sql = "SELECT version FROM versions WHERE run = ? AND pinned = 1 ORDER BY version"
    if pinned := [f"{name}@{row['version']}" for row in store.rows(sql, (name,))]:
        raise Conflict(f"pinned: {', '.join(pinned)}", hint=f"`lorad unpin {pinned[0]}` first.")


def begin_attempt(store: Store, name: str, *, resumed_from: int | None) -> int:
    """Begin an attempt, with a number that was never used before. Raises NotFound."""
    with store.write() as connection:
        attempt = int(get(store, name).attempt) + 1
        row = {"run": name, "attempt": attempt, "resumed_from": resumed_from, "started_at": time.time()}
        insert_row(connection, "attempts", row)
        update_rows(connection, "runs", {"attempt": attempt}, name=name)
    return attempt


def place(store: Store, name: str, pool: str, *, waiting: str, resumed_from: int | None) -> RunRow:
    """Begin an attempt of a queued run in a pool, and note what was foreseen of it as past. Raises NotFound,
    Conflict.

    waiting: what it waits for until it runs.
    resumed_from: the step of the checkpoint that it begins with; None for a first start.
    """
    with store.write():
        begin_attempt(store, name, resumed_from=resumed_from)
        forecasts.started(store, name, time.time())
        return move(store, name, Move.PLACE, detail=f"pool {pool}", also={"pool": pool, "waiting": waiting})


def end_attempt(
    store: Store,
    name: str,
    attempt: int,
    *,
    exit_code: int | None,
    signal: int | None,
    reason: str | None,
    detail: str = "",
) -> None:
    """Record how the driver of an attempt ended. The first record counts; another only adds what it lacks.

    detail: why it ended, as a sentence.
    """
    sql = (
        "UPDATE attempts SET detail = CASE detail WHEN '' THEN ? ELSE detail END, "
        "ended_at = coalesce(ended_at, ?), exit_code = coalesce(exit_code, ?), "
        "signal = coalesce(signal, ?), reason = coalesce(reason, ?) WHERE run = ? AND attempt = ?"
    )
    with store.write() as connection:
        connection.execute(sql, (detail, time.time(), exit_code, signal, reason, name, attempt))


def attempts(store: Rows, name: str) -> list[Attempt]:
    """List the attempts of a run in order."""
    rows = store.rows(f"SELECT {_ATTEMPT} FROM attempts WHERE run = ? ORDER BY attempt", (name,))
    return [Attempt(**row) for row in rows]
