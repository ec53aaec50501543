"""Pools, the devices that they hold, and devices that users keep from them."""

import time
from typing import Any

from msgspec.structs import asdict

from lorad.errors import NotFound
from lorad.store import events
from lorad.store.db import Rows, Store
from lorad.store.rows import LeaseRow, PoolRow, ReservationRow

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


def reservations(store: Rows) -> list[ReservationRow]:
    """List the reservations, oldest first."""
    rows = store.rows("SELECT * FROM reservations ORDER BY made_at, rowid")
    return [ReservationRow(**{**row, "urgent": bool(row["urgent"])}) for row in rows]


def reserve(store: Store, row: ReservationRow, name: str) -> None:
    """Keep a reservation in place of one of the same device. name: of the device, for the event."""
    values = asdict(row)
    names, marks = ", ".join(values), ", ".join(f":{key}" for key in values)
    sets = ", ".join(f"{key} = excluded.{key}" for key in values)
    with store.write() as connection:
        connection.execute(
            f"INSERT INTO reservations ({names}) VALUES ({marks}) ON CONFLICT (device) DO UPDATE SET {sets}",
            values,
        )
        about = {"device": name, "why": row.why, "until": row.until, "by": row.owner}
        events.append(store, None, "reserved", about)


def begin_reservation(store: Store, device: str, at: float, until: float | None) -> None:
    """Write down since when nothing of lorad is on the device, and until when it stays so."""
    with store.write() as connection:
        connection.execute(
            "UPDATE reservations SET began_at = ?, until = ? WHERE device = ?", (at, until, device)
        )


def release(store: Store, device: str, name: str, *, by: str) -> None:
    """Forget the reservation of a device, with an event. by: a user, or `daemon` where its time is over."""
    with store.write() as connection:
        connection.execute("DELETE FROM reservations WHERE device = ?", (device,))
        events.append(store, None, "released", {"device": name, "by": by})
