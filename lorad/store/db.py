"""The database: one connection, one writer, one thread."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from lorad.bounds import ANSWER_PAGE_BYTES
from lorad.errors import Conflict, IntegrityError, LoradError
from lorad.files import fsync, is_name_of
from lorad.migrations import MIGRATIONS
from lorad.store.record import Journal, Recorder, number_of
from lorad.store.record import Row as Row

_Parameters = Sequence[Any] | Mapping[str, Any]

_BUSY_SECONDS = 2.0  # how long a write waits for another connection
_STILL_BUSY_SECONDS = 0.05  # ... the next ones, until one succeeds: the daemon answers meanwhile
# reading 1.2 GB takes 1.8 s; a larger file is read through only after a crash
ALWAYS_CHECKED_BYTES = 256 * 2**20
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")

_UNUSABLE = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY),
    sqlite3.SQLITE_CANTOPEN,
}
_REPAIR = (
    "`lorad doctor --repair` rebuilds it from the journals and keeps this one. No run directory was touched."
)
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class Rows:
    """Reads from a database by one connection.

    Everything raises IntegrityError when the file is damaged, and LoradError when it cannot be used now.
    """

    path: Path
    _connection: sqlite3.Connection

    def rows(self, sql: str, parameters: _Parameters = ()) -> list[Row]:
        """Read the rows of the answer as dicts."""
        with self._in_words():
            cursor = self._connection.execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, values, strict=True)) for values in cursor]

    def tuples(self, sql: str, parameters: _Parameters = ()) -> list[tuple[Any, ...]]:
        """Read the rows as tuples, which is quicker where there are many."""
        with self._in_words():
            return self._connection.execute(sql, parameters).fetchall()

    def page(self, sql: str, parameters: Sequence[Any], *, size: str, limit: int) -> list[Row]:
        """Read the rows of a statement with the largest `id`, oldest first: at most `limit`, and no more than
        fit into an answer.

        size: an expression of SQL for the bytes of a row.
        """
        sized = f"SELECT *, sum({size}) OVER (ORDER BY id DESC) AS bytes_so_far"
        newest = f"FROM (SELECT * FROM ({sql}) ORDER BY id DESC LIMIT ?)"
        rows = self.rows(
            f"SELECT * FROM ({sized} {newest}) WHERE bytes_so_far <= ? ORDER BY id",
            (*parameters, limit, ANSWER_PAGE_BYTES),
        )
        return [{key: value for key, value in row.items() if key != "bytes_so_far"} for row in rows]

    def row(self, sql: str, parameters: _Parameters = ()) -> Row | None:
        """Read the first row of the answer; None when there is none."""
        return next(iter(self.rows(sql, parameters)), None)

    def count(self, table: str) -> int:
        """Count the rows of a table."""
        return int(self.rows(f"SELECT count(*) AS n FROM {table}")[0]["n"])

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn errors that are not bugs into LoradErrors."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _DAMAGED:
                raise self._damaged(str(error)) from error
            if code in _UNUSABLE:
                hint = (
                    "Nothing was changed. See `df` and the mode of the file; `lsof` shows who else has "
                    "it open."
                )
                raise LoradError(f"the database {self.path} cannot be used: {error}", hint=hint) from error
            raise

    def _damaged(self, how: str) -> IntegrityError:
        return IntegrityError(f"the database {self.path} is damaged: {how}", hint=_REPAIR)


class Reader(Rows):
    """A connection that only reads what was committed. Each thread has its own.

    Raises LoradError where there is no database.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._in_words():
            uri = f"{path.absolute().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )

    def close(self) -> None:
        """Close the connection. If that fails, it ends with the process."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    @contextlib.contextmanager
    def at_once(self) -> "Iterator[Reader]":
        """Answer all reads within the block from the same moment."""
        with self._in_words():
            self._connection.execute("BEGIN")
            try:
                yield self
            finally:
                self._connection.execute("ROLLBACK")


class Store(Rows):
    """The database of a home, at the schema of this lorad. Only the thread that made it may use it.

    Raises Conflict when a newer lorad wrote it. An older schema is upgraded as one transaction, with a copy
    kept as `<path>.before-<migration>`. Everything raises IntegrityError when the file is damaged, was
    written before the first release or is of another program, and LoradError when it cannot be used now
    (disk full, read-only, locked by somebody else); then nothing was changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_upgraded = False  # migrations have just run, and no journal has their changes
        self._recorder: Recorder | None = None
        lock_path = path.with_name(path.name + ".lock")
        _create(lock_path)
        with lock_path.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _create(path)
            self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._waits = _BUSY_SECONDS
            self._file = path.stat()
            self._directory = path.parent.stat()
            try:
                with self._in_words():
                    self._prepare()
            except BaseException:
                self._connection.close()
                raise

    @property
    def schema(self) -> str:
        """The name of the newest migration that was applied."""
        return MIGRATIONS.applied(Database(self._connection))[-1].name

    @property
    def changes(self) -> int | None:
        """A number that changes with every write: while it stays the same, every read has the same answer.

        It is None within a `write`.
        """
        return None if self._connection.in_transaction else self._connection.total_changes

    @contextlib.contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Open a transaction, from BEGIN IMMEDIATE to COMMIT; roll back when the block raises. Never await
        inside.

        Inside another `write` it is a part of that one: it commits with it, and what it did is undone if it
        raises.

        durable: the transaction is on disk when the block ends. Otherwise a power cut may undo it as a whole,
            which is fine for what is then taken in again from journals of runs. What goes into the daemon's
            own journal is on disk in any case.
        """
        connection = self._connection
        is_part = connection.in_transaction
        is_eased = not durable and not is_part
        begin = "SAVEPOINT part" if is_part else "BEGIN IMMEDIATE"
        commit = "RELEASE part" if is_part else "COMMIT"
        undo = ("ROLLBACK TO part", "RELEASE part") if is_part else ("ROLLBACK",)
        recorder = None if is_part else self._recorder
        is_written = False
        with self._in_words():
            if is_eased:  # commits reach the disk later, in their order
                connection.execute("PRAGMA synchronous = NORMAL")
            try:
                self._begin(begin)
                try:
                    yield connection
                    if recorder:
                        is_written = recorder.write_ahead()
                    connection.execute(commit)
                except BaseException:
                    for statement in undo if connection.in_transaction else ():
                        connection.execute(statement)
                    if recorder and is_written:
                        recorder.journal.undo()
                    raise
                if is_written and not durable:
                    fsync(self.path.with_name(self.path.name + "-wal"))
            finally:
                if is_eased:
                    connection.execute("PRAGMA synchronous = FULL")

    def _begin(self, statement: str) -> None:
        """Begin a transaction. While another connection keeps the lock, only the first write waits long."""
        try:
            self._connection.execute(statement)
        except sqlite3.OperationalError:
            self._wait(_STILL_BUSY_SECONDS)
            raise
        if self._waits != _BUSY_SECONDS:
            self._wait(_BUSY_SECONDS)

    def _wait(self, seconds: float) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {seconds * 1000:.0f}")
        self._waits = seconds

    @property
    def is_in_place(self) -> bool:
        """Whether the file that was opened still has its name; False, too, where that cannot be looked up."""
        try:
            return is_name_of(self.path, self._file)
        except OSError:
            return False

    @property
    def is_moved(self) -> bool:
        """Whether the directory was renamed or removed; False where that cannot be looked up."""
        try:
            return not is_name_of(self.path.parent, self._directory)
        except OSError:  # a file server that does not answer for a moment
            return False

    def empty_wal(self) -> None:
        """Move what the WAL has into the database, unless a reader uses it."""
        self._connection.execute("PRAGMA busy_timeout = 0")
        with contextlib.suppress(sqlite3.OperationalError):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._wait(_BUSY_SECONDS)

    @property
    def recorded(self) -> int:
        """How many transactions went to a journal before they were committed."""
        return number_of(self._connection)

    def record(self, journal: Journal, *, all: bool) -> None:
        """Write to `journal`, before each commit, what no journal of a run contains.

        all: write the whole database to it now.
        """
        self._recorder = Recorder(self._connection, journal)
        if all:
            with self.write():
                self._recorder.write_all()

    def _prepare(self) -> None:
        """Check the file that was opened, and bring it to the schema of this lorad."""
        crashed = self.path.with_name(self.path.name + "-wal").exists()
        refuse_other_schema(self.path, Database(self._connection))
        for pragma in _PRAGMAS:
            self._connection.execute(f"PRAGMA {pragma}")
        if crashed or self.path.stat().st_size <= ALWAYS_CHECKED_BYTES:
            (row,) = self.rows("PRAGMA quick_check(1)")
            if row["quick_check"] != "ok":
                raise self._damaged(row["quick_check"])
        db = Database(self._connection)
        applied = MIGRATIONS.applied(db)
        pending = MIGRATIONS.pending(db)
        if applied and pending:
            before = self.path.with_name(f"{self.path.name}.before-{pending[0].name}")
            part = before.with_name(before.name + ".part")
            part.unlink(missing_ok=True)
            _create(part)
            with contextlib.closing(sqlite3.connect(part)) as copy:
                self._connection.backup(copy)
            part.replace(before)
            fsync(before.parent)
        if pending:
            with self.write():  # all or nothing, the table of migrations too
                MIGRATIONS.apply(db)
            self.is_upgraded = bool(applied)


def insert_row(connection: sqlite3.Connection, table: str, row: Row, rest: str = "") -> sqlite3.Cursor:
    """Insert a row; `rest` is the end of the statement."""
    names = ", ".join(f'"{name}"' for name in row)
    marks = ", ".join(f":{name}" for name in row)
    return connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks}) {rest}", row)


def put_row(connection: sqlite3.Connection, table: str, row: Row) -> None:
    """Insert a row, or set these columns where there is one with its key."""
    sets = ", ".join(f'"{name}" = excluded."{name}"' for name in row)
    insert_row(connection, table, row, f"ON CONFLICT DO UPDATE SET {sets}")


def update_rows(connection: sqlite3.Connection, table: str, columns: Row, **key: Any) -> int:
    """Set columns of the rows with a key, and return how many rows that are."""
    sets = ", ".join(f'"{name}" = ?' for name in columns)
    where = " AND ".join(f'"{name}" = ?' for name in key)
    sql = f"UPDATE {table} SET {sets} WHERE {where}"
    return connection.execute(sql, [*columns.values(), *key.values()]).rowcount


def _create(path: Path) -> None:
    """Make a file that only its owner can read, which SQLite would not."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def refuse_other_schema(path: Path, db: Database) -> None:
    """Raise Conflict for the schema of a newer lorad, IntegrityError for one that no released lorad had."""
    applied = MIGRATIONS.applied(db)
    own = [migration.name for migration in MIGRATIONS._migrations]
    if unknown := [migration.name for migration in applied if migration.name not in own]:
        raise Conflict(
            f"the database {path} was written by a newer lorad: "
            f"its schema is {unknown[-1]}, this lorad knows {own[-1]}",
            hint="`pip install -U lorad` updates lorad; or set LORAD_HOME to another directory.",
        )
    tables = db.table_names()
    if not applied and "runs" in tables:
        raise IntegrityError(
            f"the database {path} was written before lorad's first release, by another schema", hint=_REPAIR
        )
    if not applied and tables:
        raise IntegrityError(
            f"the database {path} is of another program: it has the table {tables[0]}",
            hint="Move it elsewhere, or set LORAD_HOME to another directory.",
        )
