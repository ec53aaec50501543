"""Build a database anew, of the rows in the daemon's journal and of the journals of the runs."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lorad.errors import IntegrityError
from lorad.protocol.journal import read
from lorad.store import facts
from lorad.store.db import Row, Store, put_row, update_rows
from lorad.store.facts import bounded
from lorad.store.ingest import Ingested, Portion, place_after
from lorad.store.record import KEYS, TOLD_BY_RUNS, Change
from lorad.store.rename import is_of

_Key = tuple[Any, ...]
_NOT_UNDERSTOOD = (
    *(KeyError, TypeError, OverflowError, IntegrityError),
    *(sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError),
)
_OF_A_RUN = ("attempts", "versions", "checkpoints")
_COLLECTED = """
CREATE TEMP TABLE collected (at REAL, source INTEGER, n INTEGER, id INTEGER,
told REAL, run TEXT, kind TEXT, data TEXT)
"""
_FIRST = (
    "CREATE TEMP TABLE first AS SELECT r.name AS run, c.at FROM runs r JOIN collected c ON c.id = "
    "r.first_event"
)
_LATER = (
    "UPDATE collected SET at = first.at FROM first "
    "WHERE collected.run = first.run AND collected.id IS NULL AND collected.at < first.at"
)


@dataclass
class Tables:
    """Rows by table and key, in the order in which they came to be."""

    rows: dict[str, dict[_Key, Row]] = field(default_factory=lambda: {table: {} for table in KEYS})

    def apply(self, change: Change) -> None:
        """Apply a change to the rows, as if it were committed."""
        for renamed in change.renamed:
            for table, rows in self.rows.items():
                column = "name" if table == "runs" else "run"
                self.rows[table] = {}
                for row in rows.values():
                    is_own = row.get(column) == renamed.old and is_of(renamed, table, row)
                    self.put(table, row | {column: renamed.new} if is_own else row)
        for table, keys in change.gone.items():
            for key in keys if table in KEYS else ():
                self.rows[table].pop(tuple(key), None)
                for other in _OF_A_RUN if table == "runs" else ():  # what belongs to the run goes with it
                    self.rows[other] = {k: row for k, row in self.rows[other].items() if k[0] != key[0]}
        for table, changed in change.rows.items():
            for row in changed if table in KEYS else ():
                self.put(table, row)

    def put(self, table: str, row: Row) -> None:
        """Keep columns of a row. `row` has its key and some of its columns."""
        self.rows[table].setdefault(tuple(row[column] for column in KEYS[table]), {}).update(row)


def rebuild(store: Store, tables: Tables, journals: Mapping[str, Path], number: int) -> list[str]:
    """Fill an empty database. Returns a sentence for everything that could not be taken over.

    tables: the rows of the daemon's journal.
    journals: the journals of the runs, by name.
    number: the number of the newest change in `tables`.
    """
    problems: list[str] = []
    with store.write() as connection:
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute(_COLLECTED)
        rows = tables.rows
        _insert(connection, "runs", rows["runs"].values(), problems)
        existing = {name for (name,) in connection.execute("SELECT name FROM runs")}
        # The names that each run has or had; those that only their directories describe are left out.
        own = {name: {name} for (name,), run in rows["runs"].items() if "first_event" in run}
        for event in rows["events"].values():
            name = event["run"]
            first = rows["runs"][(name,)]["first_event"] if name in own else None
            if event["kind"] == "renamed" and first is not None and event["id"] >= first:
                own[name].add(msgspec.json.decode(event["data"]).get("from", name))
        for source, run in enumerate((run for run in journals if run in existing), 1):
            problems += _take_in(store, connection, run, journals[run], source, own.get(run))
        _insert(connection, "attempts", rows["attempts"].values(), problems)
        for table in ("versions", "checkpoints"):
            _change(connection, table, rows[table].values())
        counted: Iterable[Row] = (
            {k: row[k] for k in ("name", "attempt") if k in row} for row in rows["runs"].values()
        )
        _change(connection, "runs", counted)
        for table in (
            *("aliases", "alias_moves", "sweeps", "queue_groups", "reservations"),
            *("results", "lives", "uses", "forecasts"),
        ):
            _insert(connection, table, rows[table].values(), problems)
        columns = ("at", "run", "kind", "data")
        own_events = rows["events"].values()
        _collect(connection, ((e.get("id"), *(e[key] for key in columns)) for e in own_events), 0)
        _number_events(connection)
        connection.execute("DROP TABLE collected")
    return problems


def _take_in(
    store: Store, connection: sqlite3.Connection, run: str, journal: Path, source: int, own: set[str] | None
) -> Iterator[str]:
    """Insert the rows of a run's journal, as `ingest` does, and collect its events, which are put in order
    later. Yields a sentence for everything that could not be taken over.

    own: the names that its records may have; with None they may have any, which become earlier names of the
        run.
    """
    names = {run} if own is None else own
    last: Portion = []
    after = 0
    events: list[tuple[Any, ...]] = []
    try:
        for record, offset in read(journal):
            if record.seq <= after:
                continue
            after = record.seq
            if record.run not in names:
                if own is not None:
                    yield f"{journal} has records of run {record.run}, none of which is taken over"
                    break
                names.add(record.run)
                data = msgspec.json.encode({"from": record.run, "by": "repair"}).decode()
                events.append((None, record.at, run, "renamed", data))
            try:
                record, _ = bounded(record)
                facts.put(connection, run, record)
            except _NOT_UNDERSTOOD as error:
                yield f"record {record.seq} of {journal} is not understood: {error!r}"
                break
            if record.kind in TOLD_BY_RUNS:
                data = msgspec.json.encode(facts.event_data(record)).decode()
                events.append((None, record.at, run, record.kind, data))
            last = [*last[-1:], (record, offset)]
    except (OSError, IntegrityError) as error:  # the journal cannot be read
        yield f"{journal} cannot be read after record {after}: {error}"
    _collect(connection, events, source)
    facts.summarize(store, connection, run)
    place = place_after(last, Ingested())
    put_row(connection, "journal_offsets", {"run": run} | msgspec.structs.asdict(place))


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[Row], problems: list[str]) -> None:
    """Insert rows, without columns that this schema lacks; each refusal is a sentence in `problems`."""
    columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    for row in rows:
        try:
            put_row(connection, table, {name: value for name, value in row.items() if name in columns})
        except sqlite3.IntegrityError as error:
            problems.append(f"{' '.join(str(row[column]) for column in KEYS[table])} of {table}: {error}")


def _change(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    """Update rows that exist already."""
    keys = KEYS[table]
    for row in rows:
        if values := {name: value for name, value in row.items() if name not in keys}:
            update_rows(connection, table, values, **{name: row[name] for name in keys})


def _collect(connection: sqlite3.Connection, events: Iterable[tuple[Any, ...]], source: int) -> None:
    """Collect events of one source in its order, even if the clock went back meanwhile."""
    newest = 0.0
    rows: list[tuple[Any, ...]] = []
    for n, (id, at, run, kind, data) in enumerate(events):
        newest = max(newest, at)
        rows.append((newest, source, n, id, at, run, kind, data))
    connection.executemany("INSERT INTO collected VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _number_events(connection: sqlite3.Connection) -> None:
    """Number the events in order of time. Those that have a number keep it; the others get free numbers
    between, or later ones.

    The next event gets a larger number than any event ever had, so that followers continue where they were.
    """
    # Whatever the clock said, nothing of a run comes before its first event.
    for statement in (_FIRST, _LATER, "DROP TABLE first"):
        connection.execute(statement)
    numbers = [
        row[0] for row in connection.execute("SELECT id FROM collected WHERE id IS NOT NULL ORDER BY id")
    ]
    (count,) = connection.execute("SELECT count(*) FROM collected").fetchone()
    rows = connection.execute("SELECT id, told, run, kind, data FROM collected ORDER BY at, source, n")
    numbered = ((id, *row) for id, row in _in_order(rows, set(numbers)))
    connection.executemany("INSERT INTO events (id, at, run, kind, data) VALUES (?, ?, ?, ?, ?)", numbered)
    if count:
        newest = max(numbers, default=0) + count - len(numbers)
        connection.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'events'", (newest,))


def _in_order(rows: Iterable[tuple[Any, ...]], taken: set[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each row with its number. `taken` has the numbers of the rows that have one."""
    free = 1
    waiting: list[tuple[Any, ...]] = []
    for id, *rest in rows:
        row = tuple(rest)
        if id is None:
            waiting.append(row)
            continue
        place = 0
        while free < id and place < len(waiting):
            if free not in taken:
                yield free, waiting[place]
                place += 1
            free += 1
        del waiting[:place]
        free = max(free, id + 1)
        yield id, row
    for row in waiting:
        while free in taken:
            free += 1
        yield free, row
        free += 1
