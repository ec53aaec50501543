"""Another name for a run: everything of it follows, no name is taken twice, and crashes lose nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lorad.daemon.runs.rename import rename
from lorad.daemon.runs.versions import has_files
from lorad.errors import Conflict, NotFound, SpecError, StorageError
from lorad.protocol.listener import user_name
from lorad.protocol.status import Use, Uses
from lorad.store.bill import Person, bill, take_in
from tests.daemon.serving.test_serve import adapter_in, serve
from tests.kit.daemon_world import Api, behave, finished, serving


def kinds(api: Api, name: str) -> list[tuple[str, dict[str, Any]]]:
    rows = api.ctx.store.rows("SELECT kind, data FROM events WHERE run = ? ORDER BY id", (name,))
    return [(row["kind"], json.loads(row["data"])) for row in rows]


async def test_everything_of_a_run_follows_its_name(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        before = await api.until("a", "ended")
        shown = await api("rename", "a", "b")
        assert (shown.name, shown.state) == ("b", "ended")
        after = await api("show", "b")
        assert (after.spec["name"], after.directory) == ("b", str(home / "runs/b"))
        assert (after.created_at, after.step, after.version) == (before.created_at, 6, 1006)
        assert json.loads((home / "runs/b/spec.json").read_text())["name"] == "b"
        assert not (home / "runs/a").exists()
        versions = await api("adapters", "b")
        assert [one.version for one in versions] == [*range(1001, 1007)]
        assert all(has_files(one.path) for one in versions)
        assert [one.step for one in await api("steps", "b")] == [1, 2, 3, 4, 5, 6]
        assert len(await api("checkpoints", "b")) == 3
        assert [kind for kind, _ in kinds(api, "a")] == ["renamed"]
        assert kinds(api, "b")[-1] == ("renamed", {"from": "a", "by": user_name(os.getuid())})
        with pytest.raises(NotFound) as refused:
            await api("show", "a")
        assert refused.value.hint == "It was renamed to b."


async def test_renamed_run_is_resumed(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        await api("rename", "a", "b")
        await api("resume", "b", steps=8)
        shown = await api.until("b", "ended")
        assert (shown.reason, shown.step, shown.attempts[-1].attempt) == ("completed", 8, 2)
        assert shown.version == 2008


async def test_queued_run_starts_under_its_new_name(home: Path) -> None:
    async with serving(home) as api:
        await api("limit_group", "night", 0)
        await api.run("a", "resources.group=night")
        assert (await api("rename", "a", "b")).state == "queued"
        await api("limit_group", "night", 1)
        shown = await api.until("b", "ended")
        assert (shown.reason, shown.version) == ("completed", 1006)


async def test_old_name_is_free_with_other_numbers(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        await api("rename", "a", "b")
        await api.run("a")
        shown = await api.until("a", "ended")
        assert (shown.reason, [one.attempt for one in shown.attempts]) == ("completed", [2])
        with pytest.raises(Conflict, match="there is a run named a"):
            await api("rename", "b", "a")
        await api("remove", "a")
        with pytest.raises(Conflict, match="another run was named a"):
            await api("rename", "b", "a")


async def test_a_rename_is_taken_back(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        for old, new in (("a", "b"), ("b", "A"), ("A", "a")):
            assert (await api("rename", old, new)).name == new
        assert [run.name for run in await api("list", all=True)] == ["a"]
        assert (await api("show", "a")).directory == str(home / "runs/a")


@pytest.mark.parametrize(
    ("new", "refusal"),
    [
        ("a b", "'a b' is no name for a run"),
        ("../b", "is no name for a run"),
        ("", "is no name for a run"),
        ("a", "run a has that name already"),
        ("other", "there is a run named other"),
        ("OTHER", "there is a run named OTHER in other capitals"),
        ("there", "runs/there is there already"),
    ],
)
async def test_name_that_cannot_be_is_refused(home: Path, new: str, refusal: str) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        finished(api.ctx, "other")
        (home / "runs/there").mkdir()
        with pytest.raises((SpecError, Conflict), match=refusal):
            await api("rename", "a", new)
        assert (await api("show", "a")).directory == str(home / "runs/a")


async def test_run_in_use_keeps_its_name(home: Path, tmp_path: Path) -> None:
    behave(home, driver={"seconds": 0.5})
    async with serving(home) as api:
        await api.run("works")
        await api.until("works", "running")
        with pytest.raises(Conflict, match="run works is running"):
            await api("rename", "works", "other")
        await api("kill", "works")
        finished(api.ctx)
        await api("pin", "a@1002")
        with pytest.raises(Conflict, match="a@1002"):
            await api("rename", "a", "b")
        await api("unpin", "a@1002")
        await api("swap", "prod", "a@1003")
        with pytest.raises(Conflict, match="prod"):
            await api("rename", "a", "b")
        await api("remove_alias", "prod")
        await api("rename", "a", "b")
        await serve(api, brought=adapter_in(tmp_path / "brought"))
        with pytest.raises(Conflict, match="run brought keeps a pool"):
            await api("rename", "brought", "c")


async def test_run_of_a_sweep_keeps_its_name(home: Path) -> None:
    async with serving(home) as api:
        sweep = {"source": "s", "cwd": "/", "overrides": ["trainer.lr=1e-4,3e-4"], "name": "lr"}
        await api("sweep", "{trainer: {steps: 2}}", **sweep, halving=None)
        await api.until("lr-1", "ended")
        with pytest.raises(Conflict, match="run lr-1 is of sweep lr"):
            await api("rename", "lr-1", "b")


@pytest.mark.system
async def test_mentions_of_versions_get_the_new_name(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("fork", "a@1004", overrides=[], name="child", steps=1, fresh=False)
        await api.run("near", "algorithm.kl={coef: 0.1, reference: a@1004}")
        await api.run("further", f"lora.adapter_path={home}/runs/a/versions/001002")
        await api.run("none", "algorithm.kl={coef: 0.1, reference: base}")
        for name in ("child", "near", "further", "none"):
            await api.until(name, "ended")
        await api("rename", "a", "b")
        assert (await api("show", "child")).origin == "b@1004"
        assert (await api("show", "near")).spec["algorithm"]["kl"]["reference"] == "b@1004"
        assert (await api("show", "none")).spec["algorithm"]["kl"]["reference"] == "base"
        path = (await api("show", "further")).spec["lora"]["adapter_path"]
        assert path == f"{home}/runs/b/versions/001002"


async def test_bill_of_either_name_is_one(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        store, owner = api.ctx.store, Person("me", os.getuid())

        def use(entry: int, held: float) -> None:
            report = Use(entry, 0, "a", 1, held=held)
            take_in(store, Uses("l1", "tiny-1", "cpu", 1, 0.0, 0.0, [report]), owner)

        use(1, 2.0)
        await api("rename", "a", "b")
        use(1, 3.0)
        use(2, 4.0)
        assert {row.key: row.held for row in bill(store) if row.device} == {"b": 7.0}


async def test_daemon_that_died_in_between_finishes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(BaseException):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Dies

    async with serving(home) as api:
        for old, new, at in (("a", "b", "os.rename"), ("other", "moved", "runs.set_fields")):
            finished(api.ctx, old)
            with monkeypatch.context() as patch, pytest.raises(Dies):
                patch.setattr(f"lorad.daemon.runs.rename.{at}", dies)
                rename(api.ctx, old, new, "me")
    assert sorted(os.listdir(home / "runs")) == ["a", "moved"]
    async with serving(home) as api:
        for name in ("b", "moved"):
            shown = await api("show", name)
            assert (shown.directory, shown.spec["name"]) == (str(home / f"runs/{name}"), name)
            assert json.loads((home / f"runs/{name}/spec.json").read_text())["name"] == name
            await api("resume", name, steps=8)
            assert (await api.until(name, "ended")).reason == "completed"


async def test_directory_that_cannot_be_renamed_keeps_the_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(13, "Permission denied")

    async with serving(home) as api:
        finished(api.ctx)
        monkeypatch.setattr("lorad.daemon.runs.rename.os.rename", refuses)
        with pytest.raises(StorageError, match="Permission denied"):
            await api("rename", "a", "b")
        monkeypatch.undo()
        assert (await api("show", "a")).directory == str(home / "runs/a")
        assert (await api("rename", "a", "b")).name == "b"
