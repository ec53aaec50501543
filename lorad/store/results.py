"""Results of versions that somebody evaluated, by the digest of their tensors."""

import time
from typing import Any

import msgspec
from msgspec import structs

from lorad.store.db import Rows, Store
from lorad.store.rows import ResultRow, result_row

_COLUMNS = ", ".join(f'"{name}"' for name in ResultRow.__struct_fields__)
_MOST = 1000  # rows that are read at once


def add(store: Store, result: ResultRow) -> ResultRow:
    """Keep what a version came to; its id and time are made here."""
    given = {**structs.asdict(result), "id": None, "at": time.time()}
    given |= {key: msgspec.json.encode(given[key]).decode() for key in ("settings", "metrics")}
    marks = ", ".join("?" * len(given))
    with store.write() as connection:
        made = connection.execute(f"INSERT INTO results ({_COLUMNS}) VALUES ({marks})", [*given.values()])
        return _select(store, "WHERE id = ?", made.lastrowid)[0]


def results(store: Rows, run: str | None = None) -> list[ResultRow]:
    """List the results of all tensors that a run has as versions, under whatever name its owner has them, or
    the newest of all; the newest last.
    """
    if run is None:
        return _select(store, "ORDER BY id DESC LIMIT ?", _MOST)[::-1]
    owner = "(SELECT name FROM runs WHERE owner_uid = (SELECT owner_uid FROM runs WHERE name = ?))"
    same = "sha256 IN (SELECT sha256 FROM versions WHERE run = ?)"
    return _select(store, f"WHERE {same} AND run IN {owner} ORDER BY id", run, run)


def _select(store: Rows, which: str, *values: Any) -> list[ResultRow]:
    return [result_row(row) for row in store.rows(f"SELECT {_COLUMNS} FROM results {which}", values)]
