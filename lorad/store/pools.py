"""Pools, the devices and nodes that they hold, and devices that users keep from them."""

import time
from typing import Any

from msgspec import Struct, json
from msgspec.structs import asdict

from lorad.errors import NotFound
from lorad.store import events
from lorad.store.db import Rows, Store, insert_row, put_row, update_rows
from lorad.store.rows import LeaseRow, PoolRow, ReservationRow


class NodeRow(Struct, frozen=True, kw_only=True):
    """A node of a cluster, as it was when a pool had it last.

    cluster: `static`, or the address of a Ray cluster.
    uid: the user as whom its agents run.
    devices: the names of its devices.
    bases: directories of base models that were loaded on it, the newest last.
    state: granted, free or lost.
    """

    node: str
    cluster: str
    address: str
    boot_id: str
    uid: int
    devices: list[str]
    bases: list[str]
    seen_at: float
    state: str


class GrantRow(Struct, frozen=True, kw_only=True):
    """What one life of a pool was granted.

    state: asked, granted, refused, lost or over.
    nodes: the names of the nodes.
    """

    pool: str
    life: int
    kind: str
    external: str
    state: str
    since: float
    nodes: list[str]
    detail: str


_FIELDS = frozenset({"state", "model", "mode", "device", "pid", "attempt", "key", "detail", "idle_since"})


def upsert(store: Store, pool: str, **columns: Any) -> PoolRow:
    """Make a pool (state, model, mode and device are needed) or change its columns. Returns its row."""
    if unknown := set(columns) - _FIELDS:
        raise ValueError(f"a pool has no {', '.join(sorted(unknown))}")
    with store.write() as connection:
        if not store.row("SELECT 1 FROM pools WHERE pool = ?", (pool,)):
            insert_row(connection, "pools", {"pool": pool, "created_at": time.time()} | columns)
        elif columns:
            update_rows(connection, "pools", columns, pool=pool)
        return get(store, pool)


def get(store: Rows, pool: str) -> PoolRow:
    """Read a pool. Raises NotFound."""
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


def lease(store: Store, pool: str, device: str, why: str, node: str = "") -> None:
    """Write down that a pool holds a device; the lock that makes it true is the caller's, or the node's."""
    with store.write() as connection:
        row = {"device": device, "pool": pool, "why": why, "taken_at": time.time(), "node": node}
        insert_row(connection, "leases", row, "ON CONFLICT DO UPDATE SET why = excluded.why")


def end_leases(store: Store, pool: str, node: str) -> None:
    """Forget what a pool held on a node."""
    with store.write() as connection:
        connection.execute("DELETE FROM leases WHERE pool = ? AND node = ?", (pool, node))


def leases(store: Rows) -> list[LeaseRow]:
    """List the leases by device."""
    return [LeaseRow(**row) for row in store.rows("SELECT * FROM leases ORDER BY device, pool")]


# -- nodes of a cluster: an index of what pools wrote, see lorad/daemon/pools/grants.py ---------------------
def put_cluster_row(store: Store, row: NodeRow | GrantRow) -> None:
    """Write down what is known of a node, or of the grant of a life of a pool, now."""
    table = "nodes" if isinstance(row, NodeRow) else "grants"
    values = asdict(row)
    lists = {
        name: json.encode(value).decode() for name, value in values.items() if isinstance(value, list | tuple)
    }
    with store.write() as connection:
        put_row(connection, table, values | lists)


def nodes(store: Rows) -> list[NodeRow]:
    """List the nodes by name."""
    rows = store.rows("SELECT * FROM nodes ORDER BY node")
    return [NodeRow(**row | {name: json.decode(row[name]) for name in ("devices", "bases")}) for row in rows]


def grants(store: Rows) -> list[GrantRow]:
    """List the grants by pool and life."""
    rows = store.rows("SELECT * FROM grants ORDER BY pool, life")
    return [GrantRow(**row | {"nodes": json.decode(row["nodes"])}) for row in rows]


# -- devices that users keep from lorad ----------------------------------------------------------------------
def reservations(store: Rows) -> list[ReservationRow]:
    """List the reservations, oldest first."""
    rows = store.rows("SELECT * FROM reservations ORDER BY made_at, rowid")
    return [ReservationRow(**{**row, "urgent": bool(row["urgent"])}) for row in rows]


def reserve(store: Store, row: ReservationRow, name: str) -> None:
    """Keep a reservation, and drop an earlier one of the device. name: what the event calls the device."""
    with store.write() as connection:
        put_row(connection, "reservations", asdict(row))
        about = {"device": name, "why": row.why, "until": row.until, "by": row.owner}
        events.append(store, None, "reserved", about)


def begin_reservation(store: Store, device: str, at: float, until: float | None) -> None:
    """Write down since when lorad has left a reserved device, and until when it stays away."""
    with store.write() as connection:
        update_rows(connection, "reservations", {"began_at": at, "until": until}, device=device)


def release(store: Store, device: str, name: str, *, by: str) -> None:
    """Forget the reservation of a device, with an event. by: a user, or `daemon` where its time is over."""
    with store.write() as connection:
        connection.execute("DELETE FROM reservations WHERE device = ?", (device,))
        events.append(store, None, "released", {"device": name, "by": by})
