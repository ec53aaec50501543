"""A home that was moved while nothing of it ran is the same home."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.daemon.context import request_of
from lorad.daemon.record.relocate import relocate
from lorad.daemon.record.repair import repair
from lorad.daemon.record.rows_and_disk import take_census
from lorad.errors import StorageError
from lorad.store import runs
from tests.daemon.record.test_repair import cut_off
from tests.daemon.runs.test_fork import fork
from tests.kit.daemon_world import Api, finished, open_context, serving
from tests.kit.leftovers import kill_leftovers
from tests.kit.world import world


def moved(home: Path) -> Path:
    """Elsewhere, with nothing of it running any more, and something else in its old place."""
    kill_leftovers(home)
    elsewhere = home / "new"
    elsewhere.mkdir()
    for path in [path for path in home.iterdir() if path != elsewhere]:
        path.rename(elsewhere / path.name)
    return elsewhere


def closed(ctx: Any) -> None:
    ctx.store.close()
    ctx.journal.close()


async def with_a_fork(api: Api) -> None:
    """Two runs that have ended: `a`, and `fresh`, which began with a version of it."""
    finished(api.ctx)
    await fork(api, "a@1004", name="fresh", fresh=True)
    await api.until("fresh", "ended")


async def works(api: Api, home: Path) -> None:
    """All that reads files of the run `a`, and new facts are taken in."""
    assert (await api("show", "a")).directory == str(home / "runs/a")
    assert (await api("show", "fresh")).spec["lora"]["adapter_path"] == str(home / "runs/fresh/origin")
    assert await api("samples", "a", step=6) == []
    assert (await api("export", "a@1006", str(home / "exported"))).version == "a@1006"
    assert {check.check for check in (await api("verify", "a")).checks} >= {"versions", "checkpoints"}
    assert (await api("swap", "bot", "a@1006")).alias == "bot"
    await api("resume", "a", steps=8)
    assert (await api.until("a", "ended")).step == 8
    assert (await api("logs", "a")).offset == (home / "runs/a/attempts/0002/log").stat().st_size
    (pool,) = [pool.setup.socket for pool in api.ctx.pools.values()]
    assert pool.startswith(str(home))
    assert take_census(api.ctx.home, api.ctx.runs_root).missing == []


@pytest.mark.system
async def test_a_home_moved_between_two_daemons_works_on(home: Path) -> None:
    async with serving(home) as api:
        await with_a_fork(api)
    new = moved(home)
    (found,) = take_census(Home(new), new / "runs").missing
    assert (
        found.what == f"the files of 2 runs were moved to {new}/runs" and "lorad daemon start" in found.advice
    )
    async with serving(new) as api:
        (event,) = api.ctx.store.rows("SELECT data FROM events WHERE kind = 'moved'")
        told = {"runs": 2, "from": f"{home}/runs", "to": f"{new}/runs", "by": "daemon"}
        assert json.loads(event["data"]) == told
        await works(api, new)
    cut_off(new)
    assert repair(Home(new)).told == []  # the journal knows where they are now
    kill_leftovers(home)


@pytest.mark.parametrize("journal", ["whole", "gone"])
async def test_a_moved_home_is_repaired_where_it_is(home: Path, journal: str) -> None:
    async with serving(home) as api:
        await with_a_fork(api)
    new = moved(home)
    cut_off(new)
    if journal == "gone":
        (new / "journal.jsonl").unlink()
    repair(Home(new))
    async with serving(new) as api:
        await works(api, new)
    kill_leftovers(home)


@pytest.mark.system
def test_run_in_a_moved_home_ends_and_resumes() -> None:
    with world() as made:
        made.lorad("run", made.spec(), "trainer.steps=100000", "--name", "a", "--detach")
        made.reached("a", 3)
        old, pids = made.home.root, (made.pid("a", "driver"), made.client.status().pid)
        made.home = Home(old.rename(old.with_name("new")))
        made.client = Client(made.home)
        made.until(
            lambda: not any(map(psutil.pid_exists, pids)),
            "nothing that driver and daemon write would be kept",
        )
        made.lorad("daemon", "start")
        ended = made.over("a")
        assert ended.reason == "failed" and f"{old}/runs/a was moved or removed" in ended.detail
        assert ended.directory == f"{made.home.root}/runs/a"
        made.lorad("resume", "a", "--steps", ended.step + 2, "--wait")
        kill_leftovers(old)


def test_foreign_directories_are_not_taken_for_runs(home: Path) -> None:
    """A link elsewhere and the journal of another run are refused; the verb's error says what is missing."""
    ctx = open_context(home)
    for name in ("a", "b", "c"):
        finished(ctx, name)
    closed(ctx)
    new = moved(home)
    (new / "runs/a").rename(home / "outside")
    (new / "runs/a").symlink_to(home / "outside")
    (new / "runs/b").rename(new / "runs/x")
    shutil.copytree(new / "runs/c", new / "runs/b")
    ctx = open_context(new)
    relocate(ctx)
    places = {name: runs.get(ctx.store, name).directory for name in ("a", "b", "c")}
    assert places == {"a": f"{home}/runs/a", "b": f"{home}/runs/b", "c": f"{new}/runs/c"}
    with pytest.raises(StorageError, match=r"runs/a/request\.json cannot be read"):
        request_of(runs.get(ctx.store, "a"))
    closed(ctx)


def test_a_copied_home_works_in_its_own_files(home: Path) -> None:
    ctx = open_context(home)
    finished(ctx, "a")
    closed(ctx)
    shutil.copytree(home, home / "copy")
    ctx = open_context(home / "copy")
    relocate(ctx)
    assert runs.get(ctx.store, "a").directory == f"{home}/copy/runs/a"
    closed(ctx)
