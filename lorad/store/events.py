"""Events: who did what, append-only, numbered in order. They outlive the runs that they tell of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from lorad.store.db import Row, Rows, Store


def append(store: Store, run: str | None, kind: str, data: Mapping[str, Any], *, at: float | None = None) -> int:
    """Add an event, in the transaction that is open if one is: its id, larger than every earlier one."""
    values = (time.time() if at is None else at, run, kind, msgspec.json.encode(data).decode())
    with store.write() as connection:
        cursor = connection.execute("INSERT INTO events (at, run, kind, data) VALUES (?, ?, ?, ?)", values)
    return int(cursor.lastrowid or 0)


def after(store: Rows, id: int, run: str | None = None, limit: int = 1000) -> list[Row]:
    """Events with a larger id, in order: {id, at, run, kind, data}. Of `run`: not those of a removed namesake."""
    if run is None:
        rows = store.rows("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", (id, limit))
    else:
        first = store.row("SELECT first_event FROM runs WHERE name = ?", (run,)) or {"first_event": 0}
        sql = "SELECT * FROM events WHERE run = ? AND id > ? AND id >= ? ORDER BY id LIMIT ?"
        rows = store.rows(sql, (run, id, first["first_event"], limit))
    return [row | {"data": msgspec.json.decode(row["data"])} for row in rows]


def newest(store: Rows, limit: int, run: str | None = None) -> list[Row]:
    """The last events, oldest of them first, as `after` has them."""
    if run is None:
        rows = store.rows("SELECT * FROM events ORDER BY id DESC LIMIT ?", (limit,))
    else:
        first = store.row("SELECT first_event FROM runs WHERE name = ?", (run,)) or {"first_event": 0}
        sql = "SELECT * FROM events WHERE run = ? AND id >= ? ORDER BY id DESC LIMIT ?"
        rows = store.rows(sql, (run, first["first_event"], limit))
    return [row | {"data": msgspec.json.decode(row["data"])} for row in reversed(rows)]


def last_id(store: Rows) -> int:
    """The id of the newest event; 0 when there is none."""
    row = store.row("SELECT max(id) AS id FROM events")
    return (row and row["id"]) or 0
