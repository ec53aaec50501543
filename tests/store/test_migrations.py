"""Migrations: an older schema is upgraded with all its rows, a newer one is refused, and no crash or race
leaves half a schema.
"""

import contextlib
import fcntl
import random
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from sqlite_utils import Database

from lorad.errors import Conflict, IntegrityError
from lorad.migrations import MIGRATIONS
from lorad.protocol.journal import JournalWriter
from lorad.states import Move
from lorad.store import aliases, runs
from lorad.store.check import check
from lorad.store.db import Row, Store
from lorad.store.ingest import ingest
from lorad.store.record import KEYS
from tests.kit.journals import begin, new_run, records_of, step, whole_run
from tests.kit.migrations import extended, m9998_colours
from tests.kit.sqlite_kill import killed_at_every_statement
from tests.kit.warm.processes import CLIENT

KNOWN = [migration.name for migration in MIGRATIONS._migrations]

EVERY = [3, pytest.param(1, marks=pytest.mark.long)]  # statements from one kill to the next

OPEN_AND_ADD_A_RUN = """
import sys
from pathlib import Path
from lorad.store.db import Store
from tests.kit.journals import new_run
print("ready", flush=True)
sys.stdin.readline()
store = Store(Path(sys.argv[1]))
new_run(store, sys.argv[2])
store.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lorad.db"


def schema_of(store: Store) -> dict[str, str]:
    return {row["name"]: row["sql"] for row in store.rows("SELECT name, sql FROM sqlite_master")}


def colours_of(store: Store) -> set[str]:
    return {row["colour"] for row in store.rows("SELECT colour FROM runs")}


def m9999_shades(database: Database) -> None:
    database.conn.execute("ALTER TABLE runs ADD COLUMN shade TEXT NOT NULL DEFAULT 'dark'")


def m9999_broken(database: Database) -> None:
    database.conn.execute("ALTER TABLE runs ADD COLUMN broken TEXT")
    database.conn.execute("INSERT INTO no_such_table VALUES (1)")


def with_rows(path: Path) -> None:
    """Make a database of today with a run of two attempts, and one that waits."""
    store = Store(path)
    new_run(store)
    new_run(store, "waiter")
    whole_run(path.with_name("journal.jsonl"), random.Random(1), attempts=2)
    ingest(store, "sorter", path.with_name("journal.jsonl"))
    aliases.move(store, "bot", "sorter", 1, by="ada", uid=1000)
    store.close()


def rows_of(store: Store) -> dict[str, list[Row]]:
    """List the rows of every table by the columns that the schema of today has."""
    found = {table: store.rows(f"SELECT * FROM {table}") for table in KEYS}
    for row in found["runs"]:
        row.pop("colour", None)
    return found


def test_an_upgrade_keeps_every_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(path)
    store = Store(path)
    before = rows_of(store)
    assert not store.is_upgraded and before["attempts"] and before["versions"] and before["aliases"]
    store.close()
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))
    store = Store(path)
    assert store.is_upgraded and store.schema == "m9998_colours"
    assert rows_of(store) == before and colours_of(store) == {"green"}
    store.close()


def test_an_upgrade_applies_only_what_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))
    store = Store(path)
    new_run(store)
    with store.write() as connection:
        connection.execute("UPDATE runs SET colour = 'red'")
    store.close()
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours, m9999_shades))
    store = Store(path)
    assert store.is_upgraded and store.schema == "m9999_shades"
    assert store.rows("SELECT colour, shade FROM runs") == [{"colour": "red", "shade": "dark"}]
    store.close()
    assert [each.name for each in path.parent.glob("*.before-*")] == ["lorad.db.before-m9999_shades"]


def test_an_upgraded_database_still_takes_in_records(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(path)
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))
    store = Store(path)
    runs.move(store, "waiter", Move.PLACE)
    journal = path.with_name("waiter.jsonl")
    with JournalWriter(journal, "waiter", 1) as writer:
        begin(writer)
        step(writer, 1)
    assert ingest(store, "waiter", journal) == records_of(journal)
    assert runs.get(store, "waiter").step == 1
    store.close()


@pytest.mark.parametrize("former", ["lorad", "lorad.store"])
def test_a_database_before_the_release_is_refused(path: Path, former: str) -> None:
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE runs (name TEXT PRIMARY KEY) STRICT")
        old.execute("CREATE TABLE _sqlite_migrations (migration_set TEXT, name TEXT, applied_at TEXT)")
        old.execute("INSERT INTO _sqlite_migrations VALUES (?, ?, '')", (former, KNOWN[0]))
    old.close()
    before = path.read_bytes()
    with pytest.raises(IntegrityError, match="before lorad's first release") as refused:
        Store(path)
    assert "`lorad doctor --repair`" in refused.value.hint
    assert check(path).problems == [refused.value.message]
    assert path.read_bytes() == before


def test_another_programs_database_is_left_alone(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE songs (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(IntegrityError, match="another program: it has the table songs") as refused:
        Store(path)
    assert refused.value.hint.startswith("Move it elsewhere")
    assert check(path).problems == [refused.value.message]
    assert path.read_bytes() == before


def test_newer_schema_is_refused_and_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))
        Store(path).close()
    before = path.read_bytes()
    with pytest.raises(Conflict) as refused:
        Store(path)
    assert refused.value.message == (
        f"the database {path} was written by a newer lorad: its schema is m9998_colours, this lorad knows "
        f"{KNOWN[-1]}"
    )
    assert refused.value.hint.startswith("`pip install -U lorad` updates lorad; or set LORAD_HOME")
    assert path.read_bytes() == before


def test_upgrade_keeps_a_copy_for_older_lorad(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(path)
    new_run(store)
    store.close()
    with monkeypatch.context() as later:
        later.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))
        upgraded = Store(path)
        assert colours_of(upgraded) == {"green"}
        upgraded.close()
    copy = Store(path.with_name("lorad.db.before-m9998_colours"))
    assert runs.get(copy, "sorter").state == "queued"
    assert copy.path.stat().st_mode & 0o077 == 0
    copy.close()


def test_an_upgrade_that_fails_half_way_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).close()
    with monkeypatch.context() as later:
        later.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours, m9999_broken))
        with pytest.raises(sqlite3.OperationalError, match="no_such_table"):
            Store(path)
    store = Store(path)
    assert store.schema == KNOWN[-1]
    assert not {"colour", "broken"} & {row["name"] for row in store.rows("PRAGMA table_info(runs)")}
    store.close()


def test_schema_is_made_under_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def m9998_asks_for_the_lock(_: Database) -> None:
        with path.with_name("lorad.db.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_asks_for_the_lock))
    store = Store(path)
    assert store.schema == "m9998_asks_for_the_lock"
    store.close()


@pytest.mark.system
def test_concurrent_first_opens_all_succeed(path: Path) -> None:
    command = [*CLIENT, "-c", OPEN_AND_ADD_A_RUN, str(path)]
    children = [
        subprocess.Popen(
            [*command, f"run-{n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for n in range(3)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
    assert [(child.communicate()[1], child.returncode) for child in children] == [(b"", 0)] * 3
    store = Store(path)
    assert {run.name for run in runs.list_runs(store, all=True)} == {"run-0", "run-1", "run-2"}
    assert [row["name"] for row in store.rows("SELECT name FROM _sqlite_migrations")] == KNOWN
    store.close()


@pytest.mark.system
@pytest.mark.parametrize("every", EVERY)
def test_kill_9_during_first_start_is_harmless(tmp_path: Path, every: int) -> None:
    new = Store(tmp_path / "new.db")
    expected = schema_of(new)
    new.close()

    def start(directory: Path) -> None:
        Store(directory / "lorad.db")

    killed = killed_at_every_statement(start, tmp_path, every=every)
    assert len(killed) > 30 / every
    for directory in killed:
        store = Store(directory / "lorad.db")
        assert schema_of(store) == expected
        new_run(store)
        store.close()


@pytest.mark.system
@pytest.mark.parametrize("every", EVERY)
def test_kill_9_during_an_upgrade_keeps_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    with_rows(tmp_path / "old.db")
    store = Store(tmp_path / "old.db")
    before = rows_of(store)
    store.close()
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))

    def upgrade(directory: Path) -> None:
        shutil.copy(tmp_path / "old.db", directory / "lorad.db")
        Store(directory / "lorad.db")

    for directory in killed_at_every_statement(upgrade, tmp_path, every=every):
        store = Store(directory / "lorad.db")
        assert colours_of(store) == {"green"}
        assert rows_of(store) == before
        store.close()
