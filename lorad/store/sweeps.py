"""Sweeps: a grid of runs, and what successive halving decided of them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lorad.errors import Conflict, NotFound
from lorad.records.sweeps import Halving, Rung, Sweep
from lorad.store.db import Rows, Store, insert_row, update_rows

_SELECT = "SELECT sweep, owner, owner_uid, created_at, grid, halving, rungs FROM sweeps"


def create(
    store: Store,
    sweep: str,
    *,
    owner: str,
    owner_uid: int,
    grid: Mapping[str, Sequence[str]],
    halving: Halving | None,
) -> Sweep:
    """Create a sweep. Raises Conflict when the name is in use."""
    with store.write() as connection:
        refuse_used(store, sweep)
        row = {
            "sweep": sweep,
            "owner": owner,
            "created_at": time.time(),
            "grid": msgspec.json.encode(grid).decode(),
            "halving": None if halving is None else msgspec.json.encode(halving).decode(),
            "owner_uid": owner_uid,
        }
        insert_row(connection, "sweeps", row)
        return get(store, sweep)


def refuse_used(store: Rows, sweep: str) -> None:
    """Raise Conflict when there is a sweep of that name."""
    if store.row("SELECT 1 FROM sweeps WHERE sweep = ?", (sweep,)):
        hint = "Choose another name with --name, or remove its runs with `lorad rm`: it goes with the last."
        raise Conflict(f"there is a sweep named {sweep}", hint=hint)


def get(store: Rows, sweep: str) -> Sweep:
    """Read a sweep. Raises NotFound."""
    if rows := sweeps(store, sweep):
        return rows[0]
    raise missing(sweep)


def missing(sweep: str) -> NotFound:
    """Make the error that a sweep does not exist."""
    return NotFound(f"no sweep {sweep}", hint="`lorad sweep --list` shows every sweep.")


def _select(store: Rows, which: str, parameters: Sequence[Any] = ()) -> list[Sweep]:
    sweeps = []
    for row in store.rows(f"{_SELECT} {which}", parameters):
        grid = msgspec.json.decode(row["grid"], type=dict[str, list[str]])
        halving = msgspec.json.decode(row["halving"] or "null", type=Halving | None)
        rungs = msgspec.json.decode(row["rungs"], type=list[Rung])
        sweeps.append(Sweep(**row | {"grid": grid, "halving": halving, "rungs": rungs}))
    return sweeps


def sweeps(store: Rows, sweep: str | None = None) -> list[Sweep]:
    """List the sweeps, newest first, or only the one of a name."""
    which, values = ("", ()) if sweep is None else ("WHERE sweep = ? ", (sweep,))
    return _select(store, which + "ORDER BY created_at DESC, rowid DESC", values)


def undecided(store: Rows) -> list[Sweep]:
    """List the sweeps that have a rung to decide, or with asha a run that has not ended, oldest first."""
    left = "json_array_length(rungs) < json_array_length(halving, '$.rungs')"
    works = "EXISTS (SELECT 1 FROM runs WHERE runs.sweep = sweeps.sweep AND state <> 'ended')"
    open_ = f"CASE json_extract(halving, '$.asha') WHEN 1 THEN {works} ELSE {left} END"
    return _select(store, f"WHERE halving IS NOT NULL AND {open_} ORDER BY created_at")


def members(store: Rows, sweep: str) -> list[str]:
    """List the names of a sweep's runs, in the order of its grid."""
    rows = store.rows("SELECT name FROM runs WHERE sweep = ? ORDER BY created_at, rowid", (sweep,))
    return [row["name"] for row in rows]


def decide(store: Store, sweep: str, rung: Rung) -> None:
    """Keep what was decided at a rung, in place of an earlier decision there."""
    with store.write() as connection:
        others = (other for other in get(store, sweep).rungs if other.step != rung.step)
        rungs = sorted([*others, rung], key=lambda rung: rung.step)
        update_rows(connection, "sweeps", {"rungs": msgspec.json.encode(rungs).decode()}, sweep=sweep)
