"""Pools and the devices that they hold."""

import time
from typing import Any

from lorad.errors import NotFound
from lorad.store.db import Rows, Store
from lorad.store.rows import LeaseRow, PoolRow

_FIELDS = frozenset({"state", "model", "mode", "device", "pid", "attempt", "key", "detail", "idle_since"})


def upsert(store: Store, pool: str, **columns: Any) -> PoolRow:
    """Make a pool (state, model, mode and device are needed) or change columns of FIELDS: its row."""
    if unknown := set(columns) - _FIELDS:
        raise ValueError(f"a pool has no {', '.join(sorted(unknown))}")
    with store.write() as connection:
        if not store.row("SELECT 1 FROM pools WHERE pool = ?", (pool,)):
            row = {"pool": pool, "created_at": time.time()} | columns
            names, values = ", ".join(f'"{key}"' for key in row), ", ".join(f":{key}" for key in row)
            connection.execute(f"INSERT INTO pools ({names}) VALUES ({values})", row)
        elif columns:
            sets = ", ".join(f'"{column}" = :{column}' for column in columns)
            connection.execute(f"UPDATE pools SET {sets} WHERE pool = :pool", columns | {"pool": pool})
        return get(store, pool)


def get(store: Rows, pool: str) -> PoolRow:
    """Raises NotFound."""
    row = store.row("SELECT * FROM pools WHERE pool = ?", (pool,))
    if row is None:
        raise NotFound(f"no pool {pool}", hint="`lorad pools` shows what there is.")
    return PoolRow(**row)


def list_pools(store: Rows) -> list[PoolRow]:
    """List the pools, oldest first."""
    return [PoolRow(**row) for row in store.rows("SELECT * FROM pools ORDER BY created_at, rowid")]


def remove(store: Store, pool: str) -> None:
    """Forget a pool and its leases."""
    with store.write() as connection:
        connection.execute("DELETE FROM pools WHERE pool = ?", (pool,))


def lease(store: Store, pool: str, device: str, why: str) -> None:
    """Write down that a pool holds a device; the lock that makes it true is the caller's."""
    with store.write() as connection:
        connection.execute(
            "INSERT INTO leases (device, pool, why, taken_at) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET why = excluded.why",
            (device, pool, why, time.time()),
        )


def leases(store: Rows) -> list[LeaseRow]:
    return [LeaseRow(**row) for row in store.rows("SELECT * FROM leases ORDER BY device, pool")]
