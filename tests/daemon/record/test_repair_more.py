"""A repair may read files that are damaged, strange, or of another lorad: only what they hold is lost."""

import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import Home
from lorad.daemon.adopt import adopt
from lorad.daemon.api.verbs import control, gc
from lorad.daemon.api.verbs import versions as verbs
from lorad.daemon.context import Context
from lorad.daemon.daemon import prepare
from lorad.daemon.journal import ALL, read
from lorad.daemon.open_store import open_store
from lorad.daemon.record.repair import repair
from lorad.daemon.record.rows_and_disk import take_census
from lorad.daemon.runs.take_in import refuse_journal
from lorad.daemon.storage.budget import GONE
from lorad.daemon.storage.prune import REMOVED, Doomed
from lorad.errors import IntegrityError, StorageError
from lorad.protocol.journal import JournalWriter
from lorad.store import events, runs
from lorad.store.versions import set_pinned
from tests.daemon.record.test_repair import cut_off, tables
from tests.daemon.storage.test_gc import keep_one, versions
from tests.kit.daemon_world import finished, open_context, serving
from tests.kit.migrations import extended, m9998_colours


def close(ctx: Context) -> None:
    ctx.readers.close()
    ctx.store.close()
    ctx.journal.close()


def with_runs(home: Path, *names: str) -> None:
    ctx = open_context(home)
    ctx.journal.tell_start(ctx.store.schema)
    for name in names:
        finished(ctx, name)
    close(ctx)


def told_of(home: Path) -> list[tuple[str, str, int]]:
    return [(row["name"], row["state"], row["step"]) for row in tables(home)["runs"]]


def rewritten(home: Path, old: bytes, new: bytes, of: bytes = b"") -> None:
    """The changes of the journal in other words, each with its checksum."""
    path, lines = home / "journal.jsonl", []
    for line in path.read_bytes().splitlines(keepends=True):
        if b'"number":' in line and of in line:
            body = line.rpartition(b',"crc":')[0].replace(old, new)
            line = body + b',"crc":%d}\n' % zlib.crc32(body + b"}")
        lines.append(line)
    path.write_bytes(b"".join(lines))


def directory(journal: Path) -> None:
    journal.unlink()
    journal.mkdir()


def pipe(journal: Path) -> None:
    journal.unlink()
    os.mkfifo(journal)


def endless(journal: Path) -> None:
    with journal.open("ab") as file:
        file.truncate(journal.stat().st_size + (16 << 20))


def strange(journal: Path) -> None:
    with JournalWriter(journal, "a", 1) as writer:
        writer.append("end", 6, {"reason": {"of": "somebody"}})


@pytest.mark.parametrize("spoil", [directory, pipe, endless, strange])
def test_unreadable_journal_costs_only_its_run(home: Path, spoil: Callable[[Path], None]) -> None:
    with_runs(home, "a", "b")
    cut_off(home)
    spoil(home / "runs/a/journal.jsonl")
    done = repair(Home(home))
    assert (
        len(done.told) == 1 and "runs/a/journal.jsonl" in done.told[0] and "Programming" not in done.told[0]
    )
    assert [row[:2] for row in told_of(home)] == [("a", "ended"), ("b", "ended")] and told_of(home)[1][2] == 6


def test_facts_of_newer_lorad_are_left_out(home: Path) -> None:
    with_runs(home, "a", "b")
    cut_off(home)
    rewritten(home, b'"gone":{}', b'"gone":{"plans":[["x"]]}')
    rewritten(home, b'"state":"ended"', b'"state":"dreaming"', of=b'"name":"a"')
    done = repair(Home(home))
    assert done.told[0].startswith("a of runs: CHECK constraint failed") and told_of(home) == [
        ("b", "ended", 6)
    ]


def test_journal_without_first_line_repeats_no_event(home: Path) -> None:
    with_runs(home, "a", "b")
    before, path = tables(home), home / "journal.jsonl"
    assert read(path).changes[0][0] == ALL
    path.write_bytes(b"#" + path.read_bytes()[1:])
    cut_off(home)
    repair(Home(home))
    for table in ("runs", "events"):
        assert len(tables(home)[table]) == len(before[table])


def test_unknown_runs_are_adopted_from_directories(home: Path) -> None:
    """`lorad doctor` promises this in its census."""
    with_runs(home, "a", "gone", "b")
    ctx = open_context(home)
    shutil.copytree(home / "runs/gone", home / "kept")
    control.forget(ctx, "gone", home / "runs/gone", "me")
    (home / "kept").rename(home / "runs/gone")
    close(ctx)
    shutil.copytree(home / "runs/a", home / "runs/c")
    assert "lorad doctor --repair" in take_census(Home(home), home / "runs").unknown[0].advice
    assert repair(Home(home)).told == ["run c is as its directory describes it"]
    assert told_of(home) == [("a", "ended", 6), ("b", "ended", 6), ("c", "paused", 6)]
    close(open_context(home))
    assert repair(Home(home)).told == []  # the journal knows it now


def test_foreign_journal_is_not_taken_over(home: Path) -> None:
    with_runs(home, "a", "b")
    cut_off(home)
    shutil.copy(home / "runs/b/journal.jsonl", home / "runs/a")
    told = repair(Home(home)).told
    assert told == [f"{home}/runs/a/journal.jsonl has records of run b, none of which is taken over"]
    assert told_of(home) == [("a", "ended", 0), ("b", "ended", 6)]


def test_directory_known_alone_keeps_earlier_names(home: Path) -> None:
    with_runs(home, "a")
    cut_off(home)
    (home / "journal.jsonl").unlink()
    (home / "runs/a").rename(home / "runs/c")
    repair(Home(home))
    ctx = open_context(home)
    refuse_journal(ctx, runs.get(ctx.store, "c"))
    assert events.names(ctx.store, "c") == {"a", "c"} and told_of(home)[0][2] == 6
    close(ctx)


def test_senseless_directories_hide_no_other_run(home: Path) -> None:
    with_runs(home, "a", "b", "c")
    cut_off(home)
    (home / "journal.jsonl").unlink()
    for path in (home / "runs/a").rglob("spec.json"):
        path.write_text("{")
    with JournalWriter(home / "runs/b/journal.jsonl", "b", 1) as writer:
        writer.append("attempt", 6, {"no": 1})
    told = repair(Home(home)).told
    assert [word.split(" ")[0] for word in told[1:3]] == [f"{home}/runs/a", f"{home}/runs/b"]
    assert told_of(home) == [("c", "paused", 6)]


def test_repair_keeps_mode_and_owner_of_home(home: Path) -> None:
    with_runs(home, "a")
    home.chmod(0o711)
    if os.geteuid() == 0:
        os.chown(home, 4001, 4001)
    owner = home.stat().st_uid
    repair(Home(home))
    assert home.stat().st_mode & 0o777 == 0o711
    assert {path.stat().st_uid for path in (home / "lorad.db", home / "daemon.lock")} == {owner}


def test_unwritable_home_is_refused_in_words(home: Path) -> None:
    (home / "daemon.lock").mkdir()
    with pytest.raises(StorageError, match=r"daemon\.lock: Is a directory"):
        repair(Home(home))
    shutil.rmtree(home)
    home.write_text("")
    with pytest.raises(StorageError, match=str(home)):
        prepare(Home(home))
    home.unlink()
    home.mkdir()


def test_empty_database_file_counts_as_gone(home: Path) -> None:
    with_runs(home, "a")
    cut_off(home)
    (home / "lorad.db").touch()
    assert "has no tables" in take_census(Home(home), home / "runs").problems[0]
    with pytest.raises(IntegrityError, match="is gone"):
        open_store(Home(home))
    repair(Home(home))
    assert told_of(home) == [("a", "ended", 6)]


def test_what_follows_a_torn_line_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes half a line and does not let it be cut off either."""

    def failed(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    ctx, write = open_context(home), os.write
    finished(ctx)
    with monkeypatch.context() as disk, pytest.raises(StorageError):
        half = iter([lambda fd, data: write(fd, data[:20])])
        disk.setattr(os, "write", lambda fd, data: next(half, failed)(fd, data))
        disk.setattr(os, "ftruncate", failed)
        set_pinned(ctx.store, "a", 1002, True, by="me")
    set_pinned(ctx.store, "a", 1003, True, by="me")
    close(ctx)
    cut_off(home)
    repair(Home(home))
    assert [row["version"] for row in tables(home)["versions"] if row["pinned"]] == [1003]


def test_clock_set_back_hides_no_event(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, now = open_context(home), time.time
    finished(ctx, "a")
    monkeypatch.setattr(time, "time", lambda: now() - 5000)
    finished(ctx, "b")
    before = events.after(ctx.store, 0, "b")
    close(ctx)
    cut_off(home)
    repair(Home(home))
    ctx = open_context(home)
    after = events.after(ctx.store, 0, "b")
    close(ctx)
    assert sorted((e.kind, e.at) for e in after) == sorted((e.kind, e.at) for e in before)


def test_what_an_upgrade_changed_is_in_the_journal(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_runs(home, "a")
    newest = read(home / "journal.jsonl").changes[-1][1].number
    monkeypatch.setattr("lorad.store.db.MIGRATIONS", extended(m9998_colours))
    close(open_context(home))
    close(open_context(home))
    ((kind, change),) = read(home / "journal.jsonl").changes
    assert kind == ALL and change.number == newest + 1
    assert [row["colour"] for row in change.rows["runs"]] == ["green"]


def test_a_home_before_the_release_is_repaired(home: Path) -> None:
    with_runs(home, "a", "b")
    with sqlite3.connect(home / "lorad.db") as old:
        old.execute("UPDATE _sqlite_migrations SET migration_set = 'lorad.store'")
    old.close()
    with pytest.raises(IntegrityError, match="before lorad's first release"):
        open_store(Home(home))
    assert repair(Home(home)).told == []
    assert told_of(home) == [("a", "ended", 6), ("b", "ended", 6)]
    close(open_context(home))


def test_a_run_whose_removal_fails_has_its_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageError("journal.jsonl: No space left on device")

    ctx = open_context(home)
    run = finished(ctx)
    monkeypatch.setattr(ctx.journal, "write_ahead", full)
    with pytest.raises(StorageError):
        control.forget(ctx, "a", Path(run.directory), "me")
    assert runs.exists(ctx.store, "a") and (home / "runs/a/journal.jsonl").exists()
    close(ctx)


def test_interrupted_removal_is_taken_back(home: Path) -> None:
    ctx = open_context(home)
    finished(ctx, "a")
    finished(ctx, "a-1")
    (home / "runs/a-1").rename(home / f"runs/{REMOVED}a-1-17")
    (home / f"runs/{REMOVED}b-18").mkdir()
    adopt(ctx)
    assert sorted(path.name for path in (home / "runs").iterdir()) == ["a", "a-1"]
    close(ctx)


async def test_what_is_asked_for_while_gc_looks_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        list_items = gc.deletable

        async def slowly(*arguments: Any) -> list[Doomed]:
            items = await list_items(*arguments)
            set_pinned(api.ctx.store, "a", 1002, True, by="me")
            return items

        monkeypatch.setattr(gc, "deletable", slowly)
        deleted = {Path(item.path).name for item in (await api("gc")).deleted}
        assert "001001" in deleted and "001002" not in deleted
        assert versions(home) == ["001002", "001006"]


async def test_a_version_that_is_exported_is_in_hand(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        copy, seen = verbs.copy, list[int]()

        def looked(*arguments: Any) -> None:
            seen.append(api.ctx.serving.in_hand["a@1001"])
            copy(*arguments)

        monkeypatch.setattr(verbs, "copy", looked)
        await api("export", "a@1001", str(tmp_path / "out"))
        assert seen == [1] and not api.ctx.serving.in_hand


async def test_samples_pruned_for_budget_pass_the_audit(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        (home / "runs/a/samples/000001.jsonl").unlink()
        for told in (True, False):
            audit = next(check for check in (await api("verify", "a")).checks if check.check == "audit")
            assert any("000001.jsonl is missing" in problem for problem in audit.problems) is told
            events.append(api.ctx.store, "a", GONE, {"bytes": 1})
