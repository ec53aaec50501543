"""Aliases: names that serve a version each, and the log of their moves, which outlives them."""

import re
import time
from collections.abc import Sequence
from typing import Any

from lorad.errors import NotFound, SpecError
from lorad.records.versions import Alias, AliasMove
from lorad.spec.errors import NAME_HINT
from lorad.spec.numbers import NAME
from lorad.store import events
from lorad.store.db import Rows, Store, insert_row

_BASE = "base"  # what pools call the model without any adapter
_REMOVED = ("", -1)  # run and version of the move that ends an alias
_SELECT = """
SELECT a.alias, a.run, a.version, a.updated_at, a.owner_uid, v.sha256, v.attested,
  (SELECT m."by" FROM alias_moves m WHERE m.alias = a.alias ORDER BY m.id DESC LIMIT 1) AS "by"
FROM aliases a JOIN versions v ON v.run = a.run AND v.version = a.version
"""
_LOG = 'INSERT INTO alias_moves (alias, run, version, at, "by") VALUES (?, ?, ?, ?, ?)'


def check_name(alias: str) -> None:
    """Raise SpecError where `alias` is no name, or is `base`.

    It may be the name of a run: requests for that name then get what the alias serves.
    """
    if not re.fullmatch(NAME, alias) or alias.lower() == _BASE:
        hint = f"`{_BASE}` means the model without an adapter." if alias.lower() == _BASE else NAME_HINT
        raise SpecError(f"{alias!r} is no name for an alias", hint=hint)


def aliases(store: Rows, which: str = "ORDER BY a.alias", parameters: Sequence[Any] = ()) -> list[Alias]:
    """List all aliases by name, or the ones that other clauses select."""
    return [Alias(**row) for row in store.rows(_SELECT + which, parameters)]


def find(store: Rows, alias: str, reader_uid: int | None = None) -> Alias | None:
    """Find an alias; where a reader is named, only one that they own or that serves one of their runs."""
    owners = "(a.owner_uid, (SELECT owner_uid FROM runs WHERE name = a.run))"
    which = f"WHERE a.alias = ?1 AND (?2 IS NULL OR ?2 IN {owners})"
    return next(iter(aliases(store, which, (alias, reader_uid))), None)


def get(store: Rows, alias: str) -> Alias:
    """Read an alias. Raises NotFound."""
    row = find(store, alias)
    if row is None:
        raise missing(alias)
    return row


def missing(alias: str) -> NotFound:
    """Make the error that an alias does not exist."""
    hint = f"`lorad aliases` shows all; `lorad swap {alias} RUN@N` makes it."
    return NotFound(f"no alias {alias}", hint=hint)


def move(store: Store, alias: str, run: str, version: int, *, by: str, uid: int) -> Alias:
    """Let `alias` serve a version that exists. Row, move and event are written together.

    uid: the user who owns the alias if it is new.
    """
    with store.write() as connection:
        before = find(store, alias)
        now = time.time()
        row = {"alias": alias, "run": run, "version": version, "updated_at": now, "owner_uid": uid}
        sets = ", ".join(f"{name} = excluded.{name}" for name in ("run", "version", "updated_at"))
        insert_row(connection, "aliases", row, f"ON CONFLICT DO UPDATE SET {sets}")
        connection.execute(_LOG, (alias, run, version, now, by))
        previous = before and f"{before.run}@{before.version}"
        about = {"alias": alias, "version": version, "previous": previous, "by": by}
        events.add(connection, run, "alias", about)
        return get(store, alias)


def remove(store: Store, alias: str, *, by: str) -> Alias:
    """Remove an alias, and return what it served. Raises NotFound."""
    with store.write() as connection:
        before = get(store, alias)
        connection.execute("DELETE FROM aliases WHERE alias = ?", (alias,))
        connection.execute(_LOG, (alias, *_REMOVED, time.time(), by))
        about = {"alias": alias, "version": None, "previous": f"{before.run}@{before.version}", "by": by}
        events.add(connection, before.run, "alias", about)
        return before


def moves(store: Rows, alias: str) -> list[AliasMove]:
    """List the moves of an alias, newest first."""
    sql = 'SELECT alias, run, version, at, "by" FROM alias_moves WHERE alias = ? ORDER BY id DESC'
    ended = {"run": None, "version": None}
    rows = store.rows(sql, (alias,))
    return [AliasMove(**row | (ended if (row["run"], row["version"]) == _REMOVED else {})) for row in rows]


def rollbacks(store: Rows) -> dict[str, tuple[str, int]]:
    """Find, for each alias that has one, the version that it served before."""
    sql = """
    SELECT a.alias, m.run, m.version FROM aliases a JOIN alias_moves m ON m.id = (
      SELECT max(id) FROM alias_moves o WHERE o.alias = a.alias AND (o.run, o.version) != (a.run, a.version)
    ) WHERE (m.run, m.version) != (?, ?)
    """
    return {row["alias"]: (row["run"], row["version"]) for row in store.rows(sql, _REMOVED)}


def before(store: Rows, alias: str) -> tuple[str, int]:
    """Find the other version that the alias served last. Two rollbacks lead back, as with `git checkout -`.

    Raises NotFound when the alias has served no other since it was made.
    """
    now = get(store, alias)
    if (earlier := rollbacks(store).get(alias)) is not None:
        return earlier
    hint = f"`lorad aliases {alias}` shows its moves; `lorad swap {alias} RUN@N` names a version."
    raise NotFound(f"alias {alias} has served {now.run}@{now.version} only", hint=hint)
