"""The daemon's own facts, row by row, which no journal of a run has, so that the database can be rebuilt.

Triggers of this connection note which rows and columns a transaction touches; they go to the daemon's
journal, fsynced, before the transaction commits. `PRAGMA user_version` counts such transactions, which shows
how far journal and database are relative to each other. Steps, versions and the like come from the journals
of the runs and are not noted.
"""

import sqlite3
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

Row = dict[str, Any]

KEYS: dict[str, tuple[str, ...]] = {
    "runs": ("name",),
    "attempts": ("run", "attempt"),
    "versions": ("run", "version"),
    "checkpoints": ("run", "attempt", "step"),
    "aliases": ("alias",),
    "alias_moves": ("id",),
    "sweeps": ("sweep",),
    "queue_groups": ("owner_uid", "name"),
    "reservations": ("device",),
    "results": ("id",),
    "lives": ("life",),
    "uses": ("life", "entry"),
    "forecasts": ("id",),
    "events": ("id",),
}
_ONLY = {"versions": ("pinned",), "checkpoints": ("deleted_at",)}  # the rest of these is in journals of runs
_DERIVED = frozenset(
    {"step", "reward", "eval_first", "eval_last", "version", "tokens_per_second", "step_seconds"}
)
_DERIVED |= {"signals", "recent", "nll_first", "nll_last", "accuracy_last", "token_accuracy_last"}
_PASSING = frozenset({"waiting"})  # found again by every look at the queue
TOLD_BY_RUNS = (
    *("attempt", "rewind", "placed", "step", "eval", "version", "checkpoint", "warning"),
    *("expect", "end"),
)
_ENDING = ("runs", "aliases", "sweeps", "queue_groups", "reservations")
_OWN_EVENT = (
    f"({{0}}kind NOT IN ({', '.join(repr(kind) for kind in TOLD_BY_RUNS)}) "
    "OR json_type({0}data, '$.attempt') IS NULL OR json_type({0}data, '$.step') IS NULL)"
)
# Words that a note has in place of a column or, the last, of a table.
_NEW = "*"
_GONE = "-"
_RENAMED = "renamed"


class Renamed(Struct, frozen=True):
    """A run that got another name, with its rows.

    first_event: the first event of the run; smaller ones belong to a removed run of the old name.
    created_at: Unix time; rows that are older belong to a removed run of the old name.
    """

    old: str
    new: str
    first_event: int
    created_at: float


class Change(Struct, frozen=True):
    """The change of one transaction, or of the whole database.

    renamed: runs that got another name; this comes before the rest of the change.
    rows: by table, the key columns and changed columns of rows.
    gone: by table, the keys of deleted rows; everything that belongs to them was deleted, too.
    """

    number: int
    renamed: list[Renamed] = []
    rows: dict[str, list[Row]] = {}
    gone: dict[str, list[list[Any]]] = {}


class Journal(Protocol):
    """A journal that gets changes before they are committed."""

    def write_ahead(self, change: Change, *, all: bool = False) -> None:
        """Write a change to disk before returning. Raises OSError; then nothing was written."""
        ...

    def undo(self) -> None:
        """Take the last change back, because it was not committed after all."""
        ...


class Recorder:
    """Notes what the transactions of one connection change, and writes it to a journal before each commit."""

    def __init__(self, connection: sqlite3.Connection, journal: Journal) -> None:
        self._connection = connection
        self.journal = journal
        self._columns = dict[str, list[str]]()  # that are noted, without the key
        for table, key in KEYS.items():
            named = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            left_out = _DERIVED | _PASSING if table == "runs" else frozenset[str]()
            noted = _ONLY.get(table, named)
            self._columns[table] = [name for name in noted if name not in key and name not in left_out]
        for statement in ("PRAGMA temp_store = MEMORY", _NOTES, *self._triggers()):
            connection.execute(statement)

    def write_ahead(self) -> bool:
        """Write the changes of the open transaction to the journal, before its commit.

        Returns False when there are none.
        """
        noted: dict[tuple[str, str], set[str]] = {}
        for table, key, column in self._connection.execute(
            'SELECT "table", "key", "column" FROM noted ORDER BY rowid'
        ):
            noted.setdefault((table, key), set()).add(column)
        if not noted:
            return False
        renamed: list[Renamed] = []
        rows: dict[str, list[Row]] = {}
        gone: dict[str, list[list[Any]]] = {}
        for (table, text), columns in noted.items():
            key = msgspec.json.decode(text)
            if table == _RENAMED:
                renamed.append(Renamed(*key))
                continue
            changed = self._columns[table] if _NEW in columns else sorted(columns - {_GONE})
            where = " AND ".join(f'"{column}" = ?' for column in KEYS[table])
            row = next(iter(self._select(table, changed, f"WHERE {where}", key)), None)
            if row is not None:
                rows.setdefault(table, []).append(row)
            if _GONE in columns:
                gone.setdefault(table, []).append(key)
        number = number_of(self._connection) + 1
        self.journal.write_ahead(Change(number, renamed, rows, gone))
        try:
            self._count(number)
        except BaseException:
            self.journal.undo()
            raise
        return True

    def write_all(self) -> None:
        """Write all that the journal has to contain, in the open transaction, in place of earlier changes.

        The rows of each table stand in the order in which they were inserted.
        """
        rows = dict[str, list[Row]]()
        for table, columns in self._columns.items():
            where = " WHERE " + " OR ".join(f'"{name}"' for name in _ONLY[table]) if table in _ONLY else ""
            if table == "events":
                # the newest versions of removed runs, whose numbers are never used again
                removed = "kind = 'version' AND run NOT IN (SELECT name FROM runs) GROUP BY run"
                newest = f"SELECT max(id) FROM events WHERE {removed}"
                where = f" WHERE {_OWN_EVENT.format('')} OR id IN ({newest})"
            order = "" if table == "attempts" else "ORDER BY rowid"
            rows[table] = list(self._select(table, columns, f"{where} {order}", ()))
        number = number_of(self._connection) + 1
        self.journal.write_ahead(Change(number, rows=rows), all=True)
        self._count(number)

    def _count(self, number: int) -> None:
        self._connection.execute(f"PRAGMA user_version = {number}")
        self._connection.execute("DELETE FROM noted")

    def _select(self, table: str, columns: Iterable[str], rest: str, values: Iterable[Any]) -> Iterable[Row]:
        names = [*KEYS[table], *(column for column in columns if column not in KEYS[table])]
        listed = ", ".join(f'"{name}"' for name in names)
        for row in self._connection.execute(f"SELECT {listed} FROM {table} {rest}", tuple(values)):
            yield dict(zip(names, row, strict=True))

    def _triggers(self) -> Iterable[str]:
        for table, columns in self._columns.items():
            if table not in _ONLY:
                when = f"WHEN {_OWN_EVENT.format('NEW.')}" if table == "events" else ""
                yield _trigger(table, "insert", _note(table, "NEW", _NEW), when)
            if table not in ("events", "alias_moves"):
                notes = " ".join(_note(table, "NEW", c, f'OLD."{c}" IS NOT NEW."{c}"') for c in columns)
                yield _trigger(table, f"update OF {', '.join(columns)}", notes)
            if table in _ENDING:
                yield _trigger(table, "delete", _note(table, "OLD", _GONE))
        yield (
            "CREATE TEMP TRIGGER runs_renamed AFTER UPDATE OF name ON main.runs BEGIN "
            f"INSERT INTO noted VALUES ('{_RENAMED}', "
            "json_array(OLD.name, NEW.name, OLD.first_event, OLD.created_at), ''); END"
        )


_NOTES = (
    'CREATE TEMP TABLE noted ("table" TEXT, "key" TEXT, "column" TEXT, UNIQUE ("table", "key", "column"))'
)


def number_of(connection: sqlite3.Connection) -> int:
    """Read how many transactions were recorded in the life of the database."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _note(table: str, which: str, column: str, condition: str = "1") -> str:
    key = ", ".join(f'{which}."{name}"' for name in KEYS[table])
    return f"INSERT OR IGNORE INTO noted SELECT '{table}', json_array({key}), '{column}' WHERE {condition};"


def _trigger(table: str, event: str, notes: str, when: str = "") -> str:
    name = f"{table}_{event.split()[0]}_noted"
    return f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table} {when} BEGIN {notes} END"
