"""The database: transactions, one writer at a time, and damage that is found before it spreads."""

import resource
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.daemon.journal import DaemonJournal
from lorad.errors import IntegrityError, LoradError
from lorad.store import check, db, runs
from lorad.store.db import Row, Store
from tests.kit.journals import new_run


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "lorad.db")
    yield store
    store.close()


def test_a_write_inside_a_write_commits_with_it(store: Store) -> None:
    with pytest.raises(RuntimeError), store.write():
        new_run(store)
        raise RuntimeError
    assert runs.list_runs(store, all=True) == []


def test_failed_inner_write_undoes_only_itself(store: Store) -> None:
    with store.write():
        new_run(store, "kept")
        with pytest.raises(RuntimeError), store.write():
            new_run(store, "undone")
            raise RuntimeError
    assert [run.name for run in runs.list_runs(store, all=True)] == ["kept"]


def test_two_connections_that_read_and_write_lose_nothing(store: Store) -> None:
    new_run(store)

    def count_up(path: Path) -> None:
        own = Store(path)
        for _ in range(10):
            runs.begin_attempt(own, "sorter", resumed_from=None)
        own.close()

    threads = [threading.Thread(target=count_up, args=(store.path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs.get(store, "sorter").attempt == 30


def test_another_thread_cannot_use_the_connection(store: Store) -> None:
    caught: list[type[BaseException]] = []

    def use() -> None:
        try:
            store.rows("SELECT 1")
        except sqlite3.ProgrammingError as error:
            caught.append(type(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert caught == [sqlite3.ProgrammingError]


def test_the_database_is_durable_strict_and_private(store: Store) -> None:
    pragmas = {name: store.row(f"PRAGMA {name}") for name in ("journal_mode", "synchronous", "foreign_keys")}
    assert [next(iter((row or {}).values())) for row in pragmas.values()] == ["wal", 2, 1]
    tables = [row for row in store.rows("PRAGMA table_list") if "sqlite_" not in row["name"]]
    assert [row["name"] for row in tables if not row["strict"]] == [] and len(tables) == 22
    new_run(store)
    assert {path.stat().st_mode & 0o077 for path in store.path.parent.glob("lorad.db*")} == {0}


def test_write_at_ease_syncs_what_a_journal_has(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def grade() -> object:
        return next(iter((store.row("PRAGMA synchronous") or {}).values()))

    synced: list[Path] = []
    monkeypatch.setattr(db, "fsync", synced.append)
    journal = DaemonJournal(store.path.with_name("journal.jsonl"))
    store.record(journal, all=True)
    new_run(store)
    with store.write(durable=False):
        assert grade() == 1
        with store.write():
            runs.set_fields(store, "sorter", waiting="for others")  # no journal has it
    assert (grade(), synced) == (2, [])
    with store.write(durable=False):
        runs.begin_attempt(store, "sorter", resumed_from=None)
    assert synced == [store.path.with_name("lorad.db-wal")]
    journal.close()


def test_full_disk_changes_nothing(store: Store) -> None:
    new_run(store)
    pages = store.row("PRAGMA page_count")
    store.row(f"PRAGMA max_page_count = {pages and pages['page_count']}")
    with (
        pytest.raises(LoradError, match=r"lorad\.db cannot be used: database or disk is full"),
        store.write(),
    ):
        runs.begin_attempt(store, "sorter", resumed_from=None)
        for number in range(1000):
            new_run(store, f"run-{number}", directory="/long" * 100)
    store.row("PRAGMA max_page_count = 1000000")
    assert [(run.name, run.attempt) for run in runs.list_runs(store, all=True)] == [("sorter", 0)]
    assert runs.begin_attempt(store, "sorter", resumed_from=None) == 1


def test_file_at_its_size_limit_changes_nothing(store: Store) -> None:
    new_run(store)
    wal = store.path.with_name("lorad.db-wal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + 100, hard))
    try:
        with pytest.raises(LoradError, match=r"lorad\.db cannot be used: "):
            runs.begin_attempt(store, "sorter", resumed_from=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert runs.begin_attempt(store, "sorter", resumed_from=None) == 1


def test_sql_mistake_is_no_full_disk(store: Store) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        store.rows("SELECT * FROM no_such_table")


def test_large_database_is_checked_only_after_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, rows = tmp_path / "lorad.db", list[str](), Store.rows

    def note(store: Store, sql: str) -> list[Row]:
        asked.append(sql)
        return rows(store, sql)

    monkeypatch.setattr("lorad.store.db.ALWAYS_CHECKED_BYTES", 0)
    monkeypatch.setattr(Store, "rows", note)
    Store(path).close()
    assert asked == []
    path.with_name("lorad.db-wal").touch()
    Store(path).close()
    assert asked == ["PRAGMA quick_check(1)"]


@pytest.mark.parametrize("damage", [b"not a database at all" * 50, "page"])
def test_damaged_database_is_refused_and_left_alone(tmp_path: Path, damage: bytes | str) -> None:
    path = tmp_path / "lorad.db"
    store = Store(path)
    for number in range(50):
        new_run(store, f"run-{number}")
    store.close()
    whole = path.read_bytes()
    damaged = damage if isinstance(damage, bytes) else whole[:8192] + b"\xff" * 4096 + whole[12288:]
    path.write_bytes(damaged)
    with pytest.raises(IntegrityError, match=r"the database .*lorad\.db is damaged: "):
        Store(path)
    assert path.read_bytes() == damaged
    assert check.check(path).problems


def test_check_finds_dangling_rows(store: Store) -> None:
    new_run(store)
    assert check.check(store.path).problems == []
    with sqlite3.connect(store.path) as other:  # foreign keys are off by default
        other.execute("INSERT INTO attempts VALUES ('ghost', 1, NULL, 0, NULL, NULL, NULL, NULL, '')")
    other.close()
    assert check.check(store.path).problems == [
        f"{store.path}: 1 rows of attempts refer to rows of runs that are not there"
    ]


def test_a_missing_database_is_no_problem(tmp_path: Path) -> None:
    assert check.check(tmp_path / "lorad.db").problems == []


@pytest.mark.parametrize("version", [(3, 40, 1), (3, 44, 5), (3, 49, 9), (3, 50, 6), (3, 51, 2)])
def test_sqlite_with_the_wal_reset_bug_warns(version: tuple[int, int, int]) -> None:
    assert check.version_warning(version).startswith(
        f"SQLite {'.'.join(map(str, version))} can damage a database"
    )


@pytest.mark.parametrize("version", [(3, 44, 6), (3, 50, 7), (3, 51, 3), (3, 53, 0), (4, 0, 0)])
def test_sqlite_without_the_bug_has_no_warning(version: tuple[int, int, int]) -> None:
    assert check.version_warning(version) == ""
