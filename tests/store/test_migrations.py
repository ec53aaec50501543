"""Migrations: every released schema opens for ever, a newer one never, and no crash or race leaves half a
schema.
"""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations

from lorad.errors import Conflict
from lorad.migrations import MIGRATIONS
from lorad.protocol.journal import JournalWriter
from lorad.states import Move
from lorad.store import checkpoints, events, metrics, pools, runs, sweeps, versions
from lorad.store.db import Store
from lorad.store.ingest import ingest
from tests.kit.journals import begin, new_run, records_of, step
from tests.kit.sqlite_kill import killed_at_every_statement

FROZEN = sorted((Path(__file__).parents[1] / "data").glob("*.db"))
KNOWN = [migration.name for migration in MIGRATIONS._migrations]

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


def extended(*more: Callable[[Database], None]) -> Migrations:
    """The migrations of a lorad to come: those of today and `more`."""
    longer = Migrations("lorad")
    for migration in MIGRATIONS._migrations:
        longer(name=migration.name)(migration.fn)
    for apply in more:
        longer(name=apply.__name__)(apply)
    return longer


def m9998_colours(database: Database) -> None:
    database.conn.execute("ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'green'")


def colours_of(store: Store) -> set[str]:
    return {row["colour"] for row in store.rows("SELECT colour FROM runs")}


def m9999_broken(database: Database) -> None:
    database.conn.execute("ALTER TABLE runs ADD COLUMN broken TEXT")
    database.conn.execute("INSERT INTO no_such_table VALUES (1)")


def test_every_migration_has_a_frozen_database() -> None:
    assert [frozen.stem for frozen in FROZEN] == KNOWN


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: frozen.stem)
def test_a_frozen_database_opens_with_all_its_rows(path: Path, frozen: Path) -> None:
    shutil.copy(frozen, path)
    store = Store(path)
    assert store.schema == KNOWN[-1]
    assert [(run.name, run.state, run.step) for run in runs.list_runs(store, all=True)] == [
        ("waiter", "queued", 0),
        ("sorter", "ended", 2),
    ]
    assert [(row.step, row.attempt) for row in metrics.steps(store, "sorter")] == [(1, 1), (2, 2)]
    assert [(row.version, row.aliases) for row in versions.versions(store)] == [
        (1, []),
        (2, []),
        (3, ["bot"]),
    ]
    assert [attempt.reason for attempt in runs.attempts(store, "sorter")] == ["lost", "completed"]
    assert [lease.pool for lease in pools.leases(store)] == [pools.list_pools(store)[0].pool] == ["tiny-1"]
    assert checkpoints.checkpoints(store, "sorter") == [] and metrics.evals(store, "sorter") == []
    assert events.last_id(store) == 15
    store.close()


def test_sweeps_and_what_is_served_are_still_known(path: Path) -> None:
    shutil.copy(FROZEN[0].with_stem("m0002_sweeps_and_serving"), path)
    store = Store(path)
    (sweep,) = sweeps.sweeps(store)
    assert (sweep.grid, sweep.halving and sweep.halving.rungs, sweep.rungs[0].kept) == (
        {"seed": ["0", "1"]},
        [1, 5],
        ["waiter"],
    )
    assert sweeps.members(store, "grid") == ["waiter"]
    assert [(run.name, run.origin) for run in runs.that_serve(store)] == [("sorter", "older@7")]
    assert [version.pinned for version in versions.versions(store)] == [False, True, False]
    store.close()


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: frozen.stem)
def test_a_frozen_database_goes_on_working(path: Path, frozen: Path, tmp_path: Path) -> None:
    shutil.copy(frozen, path)
    store = Store(path)
    runs.move(store, "waiter", Move.PLACE)
    with JournalWriter(tmp_path / "journal.jsonl", "waiter", 1) as writer:
        begin(writer)
        step(writer, 1)
    assert ingest(store, "waiter", tmp_path / "journal.jsonl") == records_of(tmp_path / "journal.jsonl")
    assert runs.get(store, "waiter").step == 1
    store.close()


def test_an_upgraded_database_has_the_schema_of_a_new_one(path: Path, tmp_path: Path) -> None:
    shutil.copy(FROZEN[0], path)
    upgraded, new = Store(path), Store(tmp_path / "new.db")
    assert schema_of(upgraded) == schema_of(new)
    upgraded.close()
    new.close()


def test_a_newer_schema_is_refused_and_left_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_upgrade_keeps_a_copy_that_the_older_lorad_opens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_schema_is_made_under_the_lock_that_others_wait_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def m9998_asks_for_the_lock(_: Database) -> None:
        with path.with_name("lorad.db.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_asks_for_the_lock))
    store = Store(path)
    assert store.schema == "m9998_asks_for_the_lock"
    store.close()


def test_processes_that_open_a_new_database_at_once_all_succeed(path: Path) -> None:
    command = [sys.executable, "-c", OPEN_AND_ADD_A_RUN, str(path)]
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


def test_kill_9_at_any_statement_of_a_first_start_leaves_a_usable_file(tmp_path: Path) -> None:
    new = Store(tmp_path / "new.db")
    expected = schema_of(new)
    new.close()
    killed = killed_at_every_statement(lambda directory: Store(directory / "lorad.db"), tmp_path)
    assert len(killed) > 30
    for directory in killed:
        store = Store(directory / "lorad.db")
        assert schema_of(store) == expected
        new_run(store)
        store.close()


def test_kill_9_at_any_statement_of_an_upgrade_keeps_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))

    def upgrade(directory: Path) -> None:
        shutil.copy(FROZEN[0], directory / "lorad.db")
        Store(directory / "lorad.db")

    for directory in killed_at_every_statement(upgrade, tmp_path):
        store = Store(directory / "lorad.db")
        assert colours_of(store) == {"green"}
        assert len(store.rows("SELECT * FROM steps")) == 3
        store.close()
