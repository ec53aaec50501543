"""What `lorad gc` deletes, and what it leaves alone."""

import contextlib
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorad.adapters.directory import discard
from lorad.box.paths import AttemptDir, RunDir
from lorad.daemon.adopt import adopt
from lorad.daemon.context import Request
from lorad.daemon.process.processes import is_locked
from lorad.daemon.runs.create import make_directory
from lorad.daemon.state import bytes_of
from lorad.daemon.storage import budget, footprint, prune
from lorad.daemon.storage.garbage import ORPHAN_SECONDS
from lorad.daemon.storage.prune import LEFTOVER_SECONDS, doomed, lag_of, leftovers_in
from lorad.errors import Conflict
from lorad.files import remove_tree
from lorad.records.daemon import KeptVersion
from lorad.spec.model import convert
from lorad.store import runs
from tests.kit.daemon_world import Api, behave, finished, open_context, serving, until


def aged(path: Path, seconds: float) -> Path:
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"12345")
    then = time.time() - seconds - 5
    os.utime(path, (then, then))
    return path


def versions(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "runs" / "a" / "versions").iterdir())


def keep_one(api: Api) -> None:
    """Make run a keep as little as it can."""
    keep = (
        "json_set(spec, '$.checkpoint.keep', 1, '$.checkpoint.keep_versions', 1, "
        "'$.checkpoint.keep_samples', 2)"
    )
    with api.ctx.store.write() as connection:
        connection.execute(f"UPDATE runs SET spec = {keep} WHERE name = 'a'")


async def test_gc_deletes_what_lost_pin_or_alias(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        await api("pin", "a@1001")
        await api("swap", "bot", "a@1002")
        told = await api("gc", dry_run=True)
        assert len(versions(home)) == 6 and told.dry_run
        done = await api("gc")
        assert (done.deleted, done.bytes) == (told.deleted, told.bytes) and done.bytes > 0
        kinds = [Path(item.path).parent.name for item in done.deleted]
        assert {kind: kinds.count(kind) for kind in kinds} == {"checkpoints": 2, "versions": 3, "samples": 4}
        assert versions(home) == ["001001", "001002", "001006"]
        await api("unpin", "a@1001")
        await api("remove_alias", "bot")
        await until(lambda: (status := api.ctx.pools["tiny-1"].status) and not status.loaded)
        whys = {(Path(item.path).name, item.why) for item in (await api("gc")).deleted}
        assert whys == {(name, "checkpoint.keep_versions is 1") for name in ("001001", "001002")}
        assert (await api("gc")).deleted == [] and versions(home) == ["001006"]
        assert [c.step for c in await api("checkpoints", "a")] == [6]


async def test_a_version_goes_when_its_owner_discards_it(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        await api("pin", "a@1002")
        for needed in ("a@1002", "a@1006"):  # pinned, and the current one
            with pytest.raises(Conflict, match="are needed"):
                await api("discard", needed)
        assert (await api("discard", "a@1001")).path is None
        assert versions(home) == ["001002", "001003", "001004", "001005", "001006"]
        assert (await api("discard", "a@1001")).version == 1001


async def test_best_versions_and_their_checkpoints_stay(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        with api.ctx.store.write() as connection:
            connection.execute("UPDATE runs SET spec = json_set(spec, '$.checkpoint.keep_best', 1)")
            connection.execute("DELETE FROM evals")
            connection.execute(
                "INSERT INTO evals (run, attempt, step, seq, at, version, score, problems, failed) "
                "SELECT run, attempt, step, -seq, created_at, version, 1.0 / step, 8, 0 FROM checkpoints"
            )
        (best, *_) = await api("checkpoints", "a")
        await api("gc")
        assert [c.step for c in await api("checkpoints", "a")] == [best.step, 6]
        assert versions(home) == [f"{best.version:06d}", "001006"]
        assert (await api("show", "a")).best.version == best.version


async def test_keep_0_keeps_every_checkpoint(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with api.ctx.store.write() as connection:
            connection.execute("UPDATE runs SET spec = json_set(spec, '$.checkpoint.keep', 0)")
        assert [item for item in (await api("gc")).deleted if "checkpoints" in item.path] == []
        assert [c.step for c in await api("checkpoints", "a")] == [2, 4, 6]


async def test_version_loaded_or_in_hand_stays(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        await api("serving", "a@1001")
        api.ctx.serving.in_hand["a@1003"] += 1
        await api("gc")
        assert versions(home) == ["001001", "001003", "001006"]


async def test_old_leftovers_go_unknown_directories_stay(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        finished(api.ctx, "b")
        await api("remove", "b")
        old = aged(home / "runs" / "a" / "versions" / ".tmp-001007-x", LEFTOVER_SECONDS)
        young = aged(home / "runs" / "a" / "checkpoints" / ".tmp-000008-x", -100)
        removed = aged(home / "runs" / ".removed-c-1", 0)
        orphan, stranger = (aged(home / "runs" / name, ORPHAN_SECONDS) for name in ("b", "stranger"))
        done = await api("gc")
        assert {item.path for item in done.deleted} == {str(old), str(removed), str(orphan)}
        assert {path.exists() for path in (old, removed, orphan)} == {False}
        assert young.exists() and stranger.exists() and done.bytes == 15


async def test_gc_spares_what_a_run_is_writing(home: Path) -> None:
    behave(home, driver={"seconds": 5.0})
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        with api.ctx.store.write() as connection:
            connection.execute("UPDATE attempts SET started_at = started_at - 7200")
        old = aged(home / "runs" / "a" / "checkpoints" / ".tmp-000002-x", 7200)
        slow = aged(home / "runs" / "a" / "checkpoints" / ".tmp-000008-x", LEFTOVER_SECONDS)
        assert [item.path for item in (await api("gc")).deleted] == [str(old)] and slow.exists()
        await api("kill", "a")


async def test_pool_not_yet_heard_keeps_versions(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        await api("serving", "a@1001")
    ctx = open_context(home)
    adopt(ctx)
    numbers = {
        int(item.path.name) for item in doomed(ctx, runs.get(ctx.store, "a")) if item.kind == "version"
    }
    ctx.store.close()
    ctx.journal.close()
    assert 1001 not in numbers


async def test_run_about_to_resume_is_left_alone(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        aged(home / "runs" / "a" / "versions" / ".tmp-001007-x", LEFTOVER_SECONDS)
        with api.ctx.store.write() as connection:
            connection.execute("UPDATE runs SET resume_step = 2 WHERE name = 'a'")
        assert (await api("gc")).deleted == []


async def test_only_newest_logs_and_lives_stay(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        for number in range(2, 6):
            with api.ctx.store.write() as connection:
                connection.execute("UPDATE runs SET attempt = ? WHERE name = 'a'", (number,))
        for number in range(1, 6):
            attempt = home / "runs" / "a" / "attempts" / f"{number:04d}"
            attempt.mkdir(exist_ok=True)
            for name in ("log", "status.json"):
                (attempt / name).write_text("{}")
        await api("serving", "a@1001")
        for number in range(2, 6):
            life = home / "pools" / "tiny-1" / "attempts" / f"{number - 1:04d}"
            life.rename(life.with_name(f"{number:04d}"))
            aged(life, 0)
        told = {
            Path(item.path).relative_to(home): item.why for item in (await api("gc", dry_run=True)).deleted
        }
        assert {str(path): why for path, why in told.items()} == {
            **{f"runs/a/attempts/000{n}/log": "logs of the newest 3 attempts stay" for n in (1, 2)},
            **{f"pools/tiny-1/attempts/000{n}": "the newest 3 lives of pool tiny-1 stay" for n in (1, 2)},
        }
        await api("gc")
        assert (home / "runs/a/attempts/0001/status.json").exists() and not (
            home / "runs/a/attempts/0001/log"
        ).exists()
        assert sorted(path.name for path in (home / "pools/tiny-1/attempts").iterdir()) == [
            "0003",
            "0004",
            "0005",
        ]


@pytest.mark.system
async def test_long_ended_pool_loses_its_directory(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        await api("stop_pool", "tiny-1")
        await until(lambda: api.ctx.pools["tiny-1"].process.phase == "exited")
        assert not (await api("gc")).deleted
        status = home / "pools/tiny-1/attempts/0001/status.json"
        then = time.time() - 8 * 86400
        os.utime(status, (then, then))
        await until(lambda: not is_locked(AttemptDir(status.parent)))  # its shim takes a moment longer
        (item,) = (await api("gc")).deleted
        assert item.path == str(home / "pools/tiny-1") and "7 days ago" in item.why
        assert api.ctx.pools == {} and not (home / "pools/tiny-1").exists()
        await api.run("b")
        assert (await api.until("b", "ended")).reason == "completed"


async def test_budget_takes_only_what_runs_can_spare(home: Path) -> None:
    async with serving(home) as api:
        for name in ("a", "b"):
            finished(api.ctx, name)
        await api("pin", "a@1001")
        await api("swap", "bot", "a@1002")
        api.ctx.storage.disk.used = None
        await budget.look(api.ctx, 1)
        assert versions(home) == ["001001", "001002", "001004", "001006"]  # pinned, aliased, of checkpoints
        assert [path.name for path in (home / "runs/a/samples").iterdir()] == ["000006.jsonl"]
        assert [checkpoint.step for checkpoint in await api("checkpoints", "a")] == [2, 4, 6]
        told = (await api("show", "a")).warnings[-1]
        assert "5 files of samples and" in told and "versions of a were deleted" in told
        assert "nothing more can go" in api.ctx.storage.disk.warning
        found = {check.check: check.problems for check in (await api("verify", "a")).checks}
        assert found["samples"] == found["versions"] == []


async def test_rollback_target_of_alias_stays(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        for version in ("a@1003", "a@1005"):
            await api("swap", "bot", version)
        assert (await api("aliases"))[0].previous == "a@1003"
        assert (await api("gc")).kept == [KeptVersion("bot", "a@1003")]
        await until(lambda: (status := api.ctx.pools["tiny-1"].status) and "a@1003" not in status.loaded)
        await budget.look(api.ctx, 1)
        assert versions(home) == ["001003", "001005", "001006"]
        assert (await api("swap", "bot", rollback=True)).version == 1003
        await api("swap", "bot", "a@1006")  # from now on it goes back to a@1003, and no more to a@1005
        await until(lambda: (status := api.ctx.pools["tiny-1"].status) and "a@1005" not in status.loaded)
        await api("gc")
        assert versions(home) == ["001003", "001006"]


def test_without_a_budget_nothing_is_looked_at(home: Path) -> None:
    ctx = open_context(home)
    before = ctx.storage.disk.measured_at
    budget.keep_budget(ctx)
    assert not ctx.storage.disk.is_measuring and ctx.storage.disk.measured_at == before
    ctx.store.close()
    ctx.journal.close()


async def test_the_budget_takes_nothing_that_users_named(home: Path) -> None:
    async with serving(home) as api:
        for name in ("a", "c"):
            finished(api.ctx, name)
        await api("pin", "a@1001")
        await api("export", "a@1005", str(home / "exported"))
        await api("fork", "a@1003", overrides=["name=b"], name=None, steps=None, fresh=True)
        await api.until("b", "ended")
        pool = api.ctx.pools["tiny-1"]
        await until(lambda: not pool.process.is_up or (pool.status and pool.status.loaded == ["a@1001"]))
        await budget.look(api.ctx, 1)
        assert versions(home) == [f"00100{n}" for n in range(1, 7)]  # 2, 4 and 6 are of checkpoints
        assert sorted(path.name for path in (home / "runs/c/versions").iterdir()) == [
            "001002", "001004", "001006",
        ]  # fmt: skip
        assert [checkpoint.step for checkpoint in await api("checkpoints", "a")] == [2, 4, 6]
        assert (home / "exported").is_dir() and (home / "runs" / "b" / "origin").is_dir()


@pytest.mark.parametrize(
    "named",
    [
        "spec = json_set(spec, '$.algorithm.kl.reference', 'a@1003')",
        "spec = json_set(spec, '$.lora.adapter_path', directory || '/versions/001003')",
        "origin = directory || '/versions/001003'",
        "reason = 'imported'",
    ],
)
async def test_versions_that_specs_name_stay(home: Path, named: str) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with api.ctx.store.write() as connection:
            connection.execute(f"UPDATE runs SET {named}")
        await budget.look(api.ctx, 1)
        assert "001003" in versions(home)
        assert ("001001" in versions(home)) == ("imported" in named)


async def test_budget_takes_no_more_than_needed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "bytes_of", lambda paths: 1000)
    async with serving(home) as api:
        for name in ("a", "b"):
            finished(api.ctx, name)
        for path in sorted((home / "runs").glob("*/samples/*")):
            path.write_text("some")
        before = sorted((home / "runs").rglob("*"))
        await budget.look(api.ctx, 1 << 40)
        assert sorted((home / "runs").rglob("*")) == before and api.ctx.storage.disk.warning == ""
        await budget.look(api.ctx, 999)
        assert [path.name for path in set(before) - set((home / "runs").rglob("*"))] == ["000001.jsonl"]
        assert not (home / "runs/a/samples/000001.jsonl").exists()  # of the run that ended first


def test_a_file_that_two_directories_share_counts_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/file").write_bytes(b"12345")
    os.link(tmp_path / "one/file", tmp_path / "file")
    assert bytes_of([tmp_path, tmp_path / "one", tmp_path / "missing"]) == 5


def test_a_deep_directory_is_measured(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        for _ in range(1500):  # deeper than functions may call themselves
            os.mkdir("d")
            os.chdir("d")
        Path("file").write_bytes(b"12345")
    assert bytes_of([tmp_path]) == 5
    remove_tree(tmp_path / "d")


async def test_unfinished_runs_go_unknown_runs_stay(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
    ctx = open_context(home)
    for name in ("grid-1", "grid-2"):
        make_directory(ctx, convert({"name": name}), "{}", Request("/", "s", [], "m", "float32", 1))
    (home / "runs" / "grid-2" / "reference").mkdir()
    (home / "runs" / "worked").mkdir()
    (home / "runs" / "worked" / "journal.jsonl").touch()
    with ctx.store.write() as connection:  # as in an old copy of the database
        connection.execute("DELETE FROM runs")
    for path in (home / "runs" / "a").iterdir():
        if path.name not in ("spec.yaml", "spec.json", "request.json"):
            discard(path) if path.is_dir() else path.unlink()
    adopt(ctx)
    assert sorted(path.name for path in (home / "runs").iterdir()) == ["a", "worked"]
    ctx.store.close()
    ctx.journal.close()


async def test_foreign_clock_makes_no_leftovers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(home / "runs" / "a")
    path = aged(run.checkpoints / ".tmp-000001-a1-x", 300)
    assert leftovers_in(run, before=time.time()) == [path]
    monkeypatch.setattr(prune, "lag_of", lambda _: 300.0)
    assert leftovers_in(run, before=time.time()) == []


def test_the_clock_of_a_directory_is_measured(tmp_path: Path) -> None:
    assert (
        abs(lag_of(tmp_path)) < 60.0
        and lag_of(tmp_path / "none") == math.inf
        and not list(tmp_path.iterdir())
    )


async def test_version_goes_once_no_request_has_it(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        keep_one(api)
        api.ctx.serving.in_hand["a@1003"] += 1
        prune.prune(api.ctx, runs.get(api.ctx.store, "a"))
        await until(lambda: versions(home) == ["001003", "001006"])
        del api.ctx.serving.in_hand["a@1003"]
        api.ctx.loop.poke()
        await until(lambda: versions(home) == ["001006"])


async def test_run_too_large_for_the_disk_warns(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(disk_usage=lambda place: SimpleNamespace(free=10))
    monkeypatch.setattr(footprint, "shutil", full)
    async with serving(home) as api:
        await api.run("a")
        (warning,) = (await api("show", "a")).warnings
        assert "10 B are free: lower checkpoint.keep_versions" in warning
