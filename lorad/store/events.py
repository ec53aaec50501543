"""Events: who did what, append-only, numbered in order. They outlive the runs that they are about."""

import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from lorad.records.runs import Event
from lorad.store.db import Rows, Store
from lorad.store.rows import event_row

_TO = (
    "SELECT json_extract(data, '$.to') AS name FROM events WHERE run = ? AND kind = 'renamed' "
    "AND json_type(data, '$.to') IS NOT NULL"
)
_HOPS = 100  # names of a run that are followed


def append(
    store: Store, run: str | None, kind: str, data: Mapping[str, Any], *, at: float | None = None
) -> int:
    """Add an event, in the open transaction if there is one. Returns its id, the largest so far."""
    with store.write() as connection:
        return add(connection, run, kind, data, at=at)


def add(
    connection: sqlite3.Connection,
    run: str | None,
    kind: str,
    data: Mapping[str, Any],
    *,
    at: float | None = None,
) -> int:
    """Add an event to the transaction that is open on `connection`. Returns its id, as `append` does."""
    values = (time.time() if at is None else at, run, kind, msgspec.json.encode(data).decode())
    cursor = connection.execute("INSERT INTO events (at, run, kind, data) VALUES (?, ?, ?, ?)", values)
    return int(cursor.lastrowid or 0)


def after(store: Rows, id: int, run: str | None = None, limit: int = 1000) -> list[Event]:
    """List events with a larger id, in order. With `run`, those of a removed namesake are left out."""
    if run is None:
        rows = store.rows("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", (id, limit))
    else:
        sql = "SELECT * FROM events WHERE run = ? AND id > ? AND id >= ? ORDER BY id LIMIT ?"
        rows = store.rows(sql, (run, id, first_id(store, run), limit))
    return [event_row(row) for row in rows]


def moves_after(store: Rows, id: int) -> list[Event]:
    """List the first 1,000 moves of runs with a larger id, in order."""
    sql = "SELECT * FROM events WHERE id > ? AND kind = 'state' ORDER BY id LIMIT 1000"
    return [event_row(row) for row in store.rows(sql, (id,))]


def newest(store: Rows, limit: int, run: str | None = None) -> list[Event]:
    """List the last events, the oldest of them first, as many as fit into an answer. See `after`."""
    where = ""
    values: tuple[Any, ...] = ()
    if run is not None:
        where = "WHERE run = ? AND id >= ?"
        values = (run, first_id(store, run))
    rows = store.page(f"SELECT * FROM events {where}", values, size="length(data)", limit=limit)
    return [event_row(row) for row in rows]


def of_kind(store: Rows, run: str, kind: str, *, limit: int = -1) -> list[dict[str, Any]]:
    """List the data of a run's events of one kind, the newest first, at most `limit` of them."""
    sql = "SELECT data FROM events WHERE run = ? AND kind = ? AND id >= ? ORDER BY id DESC LIMIT ?"
    rows = store.rows(sql, (run, kind, first_id(store, run), limit))
    return [msgspec.json.decode(row["data"]) for row in rows]


def has_kind(store: Rows, run: str, kind: str) -> bool:
    """Check whether a run, or a removed one of that name, has an event of this kind."""
    return store.row("SELECT 1 FROM events WHERE run = ? AND kind = ? LIMIT 1", (run, kind)) is not None


def first_id(store: Rows, run: str) -> int:
    """Find the id of a run's first event; 0 where there is no such run.

    Events of that name with a smaller id belong to a removed namesake.
    """
    row = store.row("SELECT first_event FROM runs WHERE name = ?", (run,))
    return 0 if row is None else int(row["first_event"])


def last_id(store: Rows) -> int:
    """Find the id of the newest event; 0 when there is none."""
    row = store.row("SELECT max(id) AS id FROM events")
    return (row and row["id"]) or 0


# -- names that runs had before: see lorad/store/rename.py -------------------------------------------------
def names(store: Rows, run: str) -> frozenset[str]:
    """List the names that a run has or had. What was written under an earlier one is its own, too."""
    sql = (
        "SELECT json_extract(data, '$.from') AS name FROM events WHERE run = ? AND kind = 'renamed' "
        "AND json_type(data, '$.from') IS NOT NULL AND id >= ?"
    )
    return frozenset({run, *(str(row["name"]) for row in store.rows(sql, (run, first_id(store, run))))})


def present_name(store: Rows, name: str) -> str | None:
    """Find the run that had this name before; None where there is none, or it was removed."""
    for _ in range(_HOPS):
        row = store.row(f"{_TO} ORDER BY id DESC LIMIT 1", (name,))
        if row is None:
            return None
        name = row["name"]
        if store.row("SELECT 1 FROM runs WHERE name = ?", (name,)):
            return name
    return None


def name_of_attempt(store: Rows, name: str, attempt: int) -> str:
    """Find the present name of the run whose attempt began under this name."""
    first = name
    for _ in range(_HOPS):
        if store.row("SELECT 1 FROM attempts WHERE run = ? AND attempt = ?", (name, attempt)):
            return name
        sql = f"{_TO} AND json_extract(data, '$.attempt') >= ? ORDER BY id DESC LIMIT 1"
        row = store.row(sql, (name, attempt))
        if row is None:
            break
        name = row["name"]
    return first
