"""A file that cannot be read is the trouble of one run, pool or gateway: everybody else continues, and it is
said.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lorad.daemon.context import Context
from lorad.errors import IntegrityError, StorageError
from lorad.store import runs
from lorad.store.versions import set_pinned
from tests.kit.daemon_world import finished, reconciling, serving, submit, until, until_state
from tests.kit.world import world

HURTS: dict[str, Callable[[Path, bytes], object]] = {
    "directory": lambda path, data: path.mkdir(),  # reading it fails as with EIO, for root as well
    "cut": lambda path, data: path.write_bytes(data[: len(data) // 4]),
    "garbage": lambda path, data: path.write_bytes(b'["x", {"pid": "y"}]'),
    "nuls": lambda path, data: path.write_bytes(bytes(len(data) or 512)),
}
if os.geteuid():  # root reads everything
    HURTS["closed"] = lambda path, data: path.touch(mode=0)
STATUS = "attempts/0001/status.json"
FILES = {  # of each kind; what is said of those that are needed, however they are broken, begins with this
    "run": ("runs/victim", "run victim: ", (STATUS,)),
    "pool": ("pools/tiny-1", "pool tiny-1: ", (STATUS, "pool.json")),
    "gateway": ("gateway", "the gateway: ", (STATUS,)),
}
DIRECTORIES = {  # in place of these, with the beginning of what is said of that
    "run": {"journal.jsonl": "run victim: ", "request.json": "", "runtime.json": "", "spec.json": ""},
    "pool": {"life.lock": "pool tiny-1: "},
    "gateway": {"table.json": "/"},
}
OTHERS = [f"attempts/0001/{name}" for name in ("command.json", "heartbeat", "lock", "log")]


@contextlib.contextmanager
def broken(path: Path, hurt: str) -> Iterator[None]:
    """Put something else in the file's place; a process that has it open keeps it."""
    path.touch()
    aside = path.with_name(f"{path.name}.aside")
    data = path.read_bytes()
    path.rename(aside)
    HURTS[hurt](path, data)
    yield
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    aside.rename(path)


async def everything(ctx: Context) -> None:
    """A run that will be broken, one beside it, and a version that a gateway serves."""
    finished(ctx, "done")
    set_pinned(ctx.store, "done", 1006, True, by="me")
    for name in ("victim", "beside"):
        submit(ctx, name, trainer={"steps": 100_000})
        await until(partial(has_begun, ctx, name))
    await until(lambda: (ctx.home.gateway / "attempts" / "0001" / "status.json").exists())


@pytest.mark.system(but="gateway")
@pytest.mark.parametrize("kind", FILES)
async def test_one_broken_file_holds_up_nobody_else(home: Path, kind: str) -> None:
    root, said, needed = FILES[kind]
    cases = [(file, hurt, said) for file in needed for hurt in HURTS]
    cases += [(file, "directory", words) for file, words in DIRECTORIES[kind].items()]
    async with reconciling(home) as ctx:
        await everything(ctx)
        for number, (file, hurt, words) in enumerate(cases):
            with broken(home / root / file, hurt):
                await others_continue(ctx, f"new-{number}")
                if words:
                    await until(partial(is_said, ctx, words))
        with contextlib.ExitStack() as stack:
            for file in OTHERS:
                stack.enter_context(broken(home / root / file, "directory"))
            await others_continue(ctx, "new-last")
        await until(lambda: not len(ctx.loop.troubles))


def has_begun(ctx: Context, name: str) -> bool:
    return bool(runs.get(ctx.store, name).step >= 1)


def is_said(ctx: Context, words: str) -> bool:
    return any(line.startswith(words) for line in ctx.loop.troubles.lines())


async def others_continue(ctx: Context, name: str) -> None:
    """A new run is placed and finishes, and another one is taken in meanwhile."""
    step = runs.get(ctx.store, "beside").step
    submit(ctx, name)
    assert (await until_state(ctx, name, "ended")).reason == "completed"
    await until(lambda: runs.get(ctx.store, "beside").step > step)


async def test_daemon_starts_despite_broken_files(home: Path) -> None:
    async with reconciling(home) as ctx:
        await everything(ctx)
    with contextlib.ExitStack() as stack:
        for name in ("runs/victim", "pools/tiny-1", "gateway"):
            stack.enter_context(broken(home / name / STATUS, "directory"))
        async with serving(home) as api:
            await until(lambda: len(api.ctx.loop.troubles) >= 3)
            troubles = (await api("status")).troubles
            for said in ("run victim: ", "pool tiny-1: ", "the gateway: "):
                assert any(
                    line.startswith(said) and "status.json cannot be read" in line for line in troubles
                )
            await others_continue(api.ctx, "new")


async def test_pool_with_broken_lock_is_passed_over(home: Path) -> None:
    async with reconciling(home, idle_timeout=0.0) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
        await until(lambda: ctx.pools["tiny-1"].process.is_over)
        with broken(home / "pools" / "tiny-1" / "life.lock", "directory"):
            submit(ctx, "b")
            assert (await until_state(ctx, "b", "ended")).pool == "tiny-2"


@pytest.mark.system
async def test_pool_with_zeroed_status_still_serves(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        with broken(home / "pools" / "tiny-1" / STATUS, "nuls"):
            await until(lambda: len(api.ctx.loop.troubles))
            await api.run("b")
            assert (await api.until("b", "ended")).pool == "tiny-1"


async def test_run_with_unreadable_journal_can_be_killed(home: Path) -> None:
    async with serving(home) as api:
        submit(api.ctx, "a", trainer={"steps": 100_000})
        await until(partial(has_begun, api.ctx, "a"))
        with broken(home / "runs" / "a" / "journal.jsonl", "directory"):
            await until(partial(is_said, api.ctx, "run a: "))
            await api("kill", "a")
            run = await api.until("a", "ended")
        assert run.reason == "killed" and "journal.jsonl" in run.detail


async def test_foreign_journal_is_said_and_not_believed(home: Path) -> None:
    async with serving(home) as api:
        for name in ("a", "b"):
            finished(api.ctx, name)
        before = await api("adapters", "a")
    aside = shutil.copy(home / "runs/a/journal.jsonl", home / "aside")
    shutil.copy(home / "runs/b/journal.jsonl", home / "runs/a")
    async with serving(home) as api:
        await until(partial(is_said, api.ctx, "run a: "))
        assert "has records of run b" in (await api("status")).troubles[0]
        with pytest.raises(IntegrityError, match="has records of run b"):
            await api("resume", "a", steps=8)
        assert await api("adapters", "a") == before
        shutil.copy(aside, home / "runs/a/journal.jsonl")
        await until(lambda: not len(api.ctx.loop.troubles))
        await api("resume", "a", steps=8)
        assert (await api.until("a", "ended")).step == 8


async def test_journal_exchanged_under_daemon_is_said(home: Path) -> None:
    async with serving(home) as api:
        for name in ("a", "b"):
            finished(api.ctx, name)
        shutil.copy(home / "runs/b/journal.jsonl", home / "runs/a")
        with pytest.raises(IntegrityError, match="has records of run b"):
            await api("resume", "a", steps=8)
        await until(partial(is_said, api.ctx, "run a: "))


@pytest.mark.parametrize("file", ["request.json", "runtime.json"])
@pytest.mark.parametrize("hurt", ["directory", "nuls"])
async def test_refusal_names_broken_file_and_remedy(home: Path, file: str, hurt: str) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        await api("stop_pool", "tiny-1")
        await until(lambda: api.ctx.pools["tiny-1"].process.is_over)
        with broken(home / "runs" / "a" / file, hurt), pytest.raises(StorageError, match=file) as refused:
            await api("generate", "a", "hello", {})
        assert "backup" in refused.value.hint


async def test_a_database_that_was_replaced_is_said(home: Path) -> None:
    async with serving(home) as api:
        os.rename(home / "lorad.db", home / "aside.db")
        await until(lambda: len(api.ctx.loop.troubles))
        assert "lorad.db was removed or replaced" in (await api("status")).troubles[0]
        submit(api.ctx, "a")
        await until_state(api.ctx, "a", "ended")


@pytest.mark.system
def test_doctor_list_and_status_say_what_is_broken() -> None:
    with world() as made:
        made.home.root.mkdir()
        made.lorad("daemon", "start")
        (made.home.gateway / "table.json").unlink(missing_ok=True)
        (made.home.gateway / "table.json").mkdir(parents=True)
        made.until(lambda: made.client.status().troubles, "the daemon sees it")
        assert "table.json: Is a directory" in made.lorad("list").stderr.replace("\n", "")
        assert "table.json: Is a directory" in told(made.lorad("doctor", expect=1))
        assert "table.json: Is a directory" in told(made.lorad("daemon", "status"))


def told(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).replace("\n", "")
