"""The database is an index: it can be rebuilt from the journals and the directories of the runs."""

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import lorad
from lorad.box.paths import Home
from lorad.daemon.daemon import prepare
from lorad.daemon.home_lock import lock
from lorad.daemon.journal import ROWS, DaemonJournal, read
from lorad.daemon.open_store import open_store, record
from lorad.daemon.record.repair import repair
from lorad.daemon.record.rows_and_disk import take_census
from lorad.errors import Conflict, IntegrityError
from lorad.migrations import MIGRATIONS
from lorad.store.db import Store
from lorad.store.foreseen.forecasts import give
from lorad.store.versions import set_pinned
from tests.daemon.serving.test_serve import adapter_in, serve
from tests.kit.daemon_world import Api, behave, finished, open_context, serving
from tests.kit.journals import TABLES
from tests.kit.world import world

FOUND_AGAIN = ("waiting",)  # of runs: by the next look at the queue
GRID = ["trainer.lr=1e-4,3e-4"]


async def lively(api: Api, tmp_path: Path) -> None:
    """Runs that completed, were paused, killed, resumed, forked, swept, imported, aliased, pinned, tagged,
    renamed and removed; a group with a limit.
    """
    await api.run("done")
    await api.until("done", "ended")
    await api("pin", "done@1002")
    await api("label", "done", add=["good"], note="kept")
    await api("limit_group", "night", 3)
    give(api.ctx.store, "done", at=1.0, starts_at=2.0, after="other")
    for version in ("done@1003", "done@1001"):
        await api("swap", "bot", version)
    await api("swap", "gone", "done@1002")
    await api("remove_alias", "gone")
    await api("fork", "done@1004", overrides=[], name="child", steps=9, fresh=False)
    await serve(api, brought=adapter_in(tmp_path / "brought"))
    await api("sweep", "{trainer: {steps: 2}}", source="s", cwd="/", overrides=GRID, name="lr", halving=None)
    for name in ("child", "lr-1", "lr-2"):
        await api.until(name, "ended")
    await api("rename", "child", "kid")
    await api.run("away")
    await api.until("away", "ended")
    await api("remove", "away")
    behave(api.ctx.home.root, driver={"seconds": 0.5})
    for name, verb, state in (
        ("rests", "pause", "paused"),
        ("dead", "kill", "ended"),
        ("on", "pause", "paused"),
    ):
        await api.run(name)
        await api.until(name, "running")
        await api(verb, name)
        await api.until(name, state)
    await api("resume", "on", steps=8)
    await api.until("on", "running")


def tables(home: Path) -> dict[str, list[dict[str, Any]]]:
    store = Store(home / "lorad.db")
    found = {table: store.rows(f"SELECT * FROM {table} ORDER BY 1, 2, 3") for table in TABLES}
    store.close()
    return found


def without(rows: list[dict[str, Any]], *columns: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in columns} for row in rows]


def events_of(rows: list[dict[str, Any]], *, own: bool) -> list[Any]:
    """List the daemon's own events as numbered (`own`), or those of existing runs' journals, run by run."""
    told = [(r["id"], r["at"], r["run"], r["kind"], r["data"]) for r in rows]
    is_own = [
        (event, "attempt" not in json.loads(event[4]) or event[3] in ("removed", "renamed")) for event in told
    ]
    if own:
        return [event for event, mine in is_own if mine]
    others = [(run, at, *rest) for (_, at, run, *rest), mine in is_own if not mine and run != "away"]
    return sorted(others, key=lambda event: event[:2])


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for table in {*TABLES} - {"runs", "events"}:
        assert after[table] == before[table], table
    assert without(after["runs"], *FOUND_AGAIN) == without(before["runs"], *FOUND_AGAIN)
    for own in (True, False):
        assert events_of(after["events"], own=own) == events_of(before["events"], own=own)


@pytest.mark.system
async def test_lost_database_is_rebuilt_completely(home: Path, tmp_path: Path) -> None:
    async with serving(home) as api:
        await lively(api, tmp_path)
        await api("kill", "on")
        await api.until("on", "ended")
        asked = ("aliases", "sweeps", "adapters", "groups")
        told = {ask: await api(ask) for ask in asked} | {"list": await api("list", all=True)}
    before = tables(home)
    cut_off(home)
    done = repair(Home(home))
    assert (done.told, done.kept, done.counts["runs"]) == ([], None, 8)
    same(before, tables(home))
    async with serving(home) as api:
        again = {ask: await api(ask) for ask in asked} | {"list": await api("list", all=True)}
        for rows in (told, again):  # the pool that served is loading them again, or has them already
            for kind in ("adapters", "aliases"):
                rows[kind] = [replace(row, loaded=False) for row in rows[kind]]
        assert again == told
        made = await api.run("done-2")
        assert made.state == "queued"
        assert read(home / "journal.jsonl").changes[-1][0] == ROWS  # it goes on where it was


async def ended(home: Path) -> None:
    """Two runs that are over; one has an alias and a pin."""
    async with serving(home) as api:
        for name in ("a", "b"):
            await api.run(name)
            await api.until(name, "ended")
        await api("pin", "a@1002")
        await api("swap", "bot", "a@1003")


def damaged(home: Path) -> list[Path]:
    return sorted(home.glob("lorad.db.damaged-*"))


def cut_off(home: Path) -> None:
    for path in home.glob("lorad.db*"):
        path.unlink()


async def test_without_daemon_journal_directories_restore_the_runs(home: Path) -> None:
    await ended(home)
    before = tables(home)
    cut_off(home)
    (home / "journal.jsonl").unlink()
    repair(Home(home))
    after = tables(home)
    assert after["versions"] == before["versions"]
    told = [(row["name"], row["state"], row["reason"], row["step"]) for row in after["runs"]]
    assert told == [("a", "ended", "completed", 6), ("b", "ended", "completed", 6)]
    assert [(a["alias"], a["run"], a["version"]) for a in after["aliases"]] == [("bot", "a", 1003)]


@pytest.mark.system
async def test_aliases_of_lost_line_come_from_gateway(home: Path) -> None:
    await ended(home)
    path = home / "journal.jsonl"
    path.unlink()
    async with serving(home) as api:
        await api("swap", "cat", "b@1002")
    first, *rest = path.read_bytes().splitlines(keepends=True)
    assert b'"kind":"all"' in first
    path.write_bytes(b"#" + first[1:] + b"".join(rest))
    cut_off(home)
    assert "is incomplete" in repair(Home(home)).told[1]
    found = [(row["alias"], row["run"], row["version"]) for row in tables(home)["aliases"]]
    assert found == [("bot", "a", 1003), ("cat", "b", 1002)]
    assert [row["version"] for row in tables(home)["versions"] if row["pinned"]] == [1002]


@pytest.mark.system
async def test_damaged_journal_line_costs_only_its_facts(home: Path) -> None:
    await ended(home)
    path = home / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    hit = next(n for n, line in enumerate(lines) if b'"kind":"rows"' in line and b'"directory"' in line)
    lines[hit] = lines[hit].replace(b'"priority":0', b'"priority":7')
    path.write_bytes(b"".join(lines) + b'{"at": 1, "kind": "ro')
    cut_off(home)
    done = repair(Home(home))
    assert f"line {hit + 1} of {path} cannot be read" in done.told
    told = [(row["name"], row["state"], row["reason"], row["priority"]) for row in tables(home)["runs"]]
    assert told == [("a", "ended", "completed", 0), ("b", "ended", "completed", 0)]


async def test_missing_or_outdated_database_is_refused(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        api.ctx.store.empty_wal()
        old = (home / "lorad.db").read_bytes()
        await api.until("a", "ended")
        await api.run("b")
        await api.until("b", "ended")
    cut_off(home)
    with pytest.raises(IntegrityError, match="is gone") as refused:
        open_store(Home(home))
    assert "`lorad doctor --repair`" in refused.value.hint
    (home / "lorad.db").write_bytes(old)
    store, journal = open_store(Home(home)), DaemonJournal(home / "journal.jsonl")
    with pytest.raises(IntegrityError, match="is older than") as refused:
        record(store, journal)
    store.close()
    journal.close()
    assert "`lorad doctor --repair`" in refused.value.hint
    done = repair(Home(home))
    assert done.kept and damaged(home)[0].read_bytes()[:4096] == old[:4096]
    assert [row["name"] for row in tables(home)["runs"]] == ["a", "b"]


async def test_uncommitted_change_is_taken_back(home: Path) -> None:
    """The daemon dies between the line of the journal and the commit."""
    ctx = open_context(home)
    finished(ctx, "a")
    whole = (home / "journal.jsonl").read_bytes()
    finished(ctx, "b")
    ctx.store.close()
    ctx.journal.close()
    next_line = (home / "journal.jsonl").read_bytes()[len(whole) :].splitlines(keepends=True)
    ahead = whole + next(line for line in next_line if b'"number":' in line)
    cut_off(home)
    (home / "runs/b/journal.jsonl").unlink()  # it has not begun
    (home / "journal.jsonl").write_bytes(whole)
    repair(Home(home))
    (home / "journal.jsonl").write_bytes(ahead)
    ctx = open_context(home)
    ctx.store.close()
    ctx.journal.close()
    cut_off(home)
    repair(Home(home))
    assert [row["name"] for row in tables(home)["runs"]] == ["a"]


def test_a_home_with_a_daemon_is_not_repaired(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.daemon.home_lock.GOODBYE_SECONDS", 0.1)  # for one that is ending
    prepare(Home(home))
    with lock(Home(home)), pytest.raises(Conflict, match="works in") as refused:
        repair(Home(home))
    assert "`lorad daemon stop`" in refused.value.hint


@pytest.mark.system
def test_doctor_repairs_database_under_a_working_run(home: Path) -> None:
    with world() as made:
        (made.root / "slow.py").write_text(
            "import time\ndef score(completion):\n    time.sleep(0.05)\n    return 0.0\n"
        )
        keys = ("reward={name: slow.py:score, workers: 1}", "trainer.steps=10")
        made.lorad("run", made.spec(), *keys, "--name", "r", "--detach")
        made.reached("r", 2)
        assert "works with the database" in made.lorad("doctor", "--repair", expect=1).stderr
        made.lorad("daemon", "stop")
        database = made.home.database
        database.write_bytes(database.read_bytes()[:4096] + b"\xff" * 8192)
        refused = made.lorad("list", expect=5).stderr + made.lorad("daemon", "start", expect=5).stderr
        assert "is damaged" in refused and "`lorad doctor --repair`" in refused
        told = {check["name"]: check for check in json.loads(made.lorad("doctor", "--json", expect=1).stdout)}
        assert not told["database"]["ok"] and "--repair" in told["database"]["hint"]
        assert "is rebuilt: 1 runs" in made.lorad("doctor", "--repair").stdout
        assert damaged(made.home.root)
        made.lorad("daemon", "start")
        made.completed("r")
        # nothing began again
        assert [attempt["exit_code"] for attempt in made.json("show", "r")["attempts"]] == [0]


def test_census_names_missing_and_unknown_files(home: Path) -> None:
    ctx = open_context(home)
    for name in ("a", "b"):
        finished(ctx, name)
    set_pinned(ctx.store, "a", 1002, True, by="me")
    assert take_census(ctx.home, ctx.runs_root).missing == take_census(ctx.home, ctx.runs_root).unknown == []
    (home / "runs/a/versions/001002").rename(home / "runs/a/versions/002002")
    (home / "runs/a/checkpoints/000004-a1").rename(home / "runs/stranger")
    (home / "runs/b").rename(home / "elsewhere")
    (home / "pools/nobody").mkdir()
    found = take_census(ctx.home, ctx.runs_root)
    assert [finding.what.split(" ")[0:2] for finding in found.missing] == [
        ["run", "b:"],
        ["a@1002", "is"],
        ["the", "checkpoint"],
    ]
    assert {Path(word).name for f in found.unknown for word in f.what.split() if word.startswith("/")} == {
        "stranger", "002002", "nobody",
    }  # fmt: skip
    assert all(finding.advice for finding in [*found.missing, *found.unknown])
    ctx.store.close()
    ctx.journal.close()


def test_failed_transaction_leaves_the_journal_alone(home: Path) -> None:
    ctx = open_context(home)
    finished(ctx)
    before = (home / "journal.jsonl").read_bytes()
    with pytest.raises(RuntimeError), ctx.store.write() as connection:
        connection.execute("UPDATE runs SET detail = 'never'")
        raise RuntimeError
    assert (home / "journal.jsonl").read_bytes() == before
    with ctx.store.write() as connection:
        # told by its journal, and in passing
        connection.execute("UPDATE runs SET step = 1, waiting = 'for nothing'")
    assert (home / "journal.jsonl").read_bytes() == before
    with pytest.raises(sqlite3.IntegrityError), ctx.store.write() as connection:
        connection.execute("PRAGMA defer_foreign_keys = ON")
        connection.execute(
            "INSERT INTO aliases (alias, run, version, updated_at, owner_uid) VALUES ('x', 'nobody', 1, 0, 7)"
        )
    assert (home / "journal.jsonl").read_bytes() == before  # the commit itself was refused
    ctx.readers.close()
    ctx.store.close()
    ctx.journal.close()


def test_newer_schema_is_refused_with_upgrade_command(home: Path) -> None:
    ctx = open_context(home)
    ctx.journal.tell_start(ctx.store.schema)
    with ctx.store.write() as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES (?, 'm9', '')",
            (MIGRATIONS.name,),
        )
    ctx.readers.close()
    ctx.store.close()
    ctx.journal.close()
    line = (home / "journal.jsonl").read_text().replace(f'"{lorad.__version__}"', '"9.1.0"')
    (home / "journal.jsonl").write_text(line)
    with pytest.raises(Conflict, match=r"it was lorad 9\.1\.0") as refused:
        open_store(Home(home))
    assert f"{sys.executable} -m pip install -U 'lorad>=9.1.0'" in refused.value.hint
