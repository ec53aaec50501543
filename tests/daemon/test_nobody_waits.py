"""In a shared daemon what one user's processes and files do, or leave undone, holds up and misleads nobody
else.
"""

import asyncio
import os
import socket
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lorad.children.ask import under_guard
from lorad.daemon.api.views import pool_view, version_view
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.pools.as_owner import connection_to
from lorad.daemon.pools.life import ask_status, refresh
from lorad.daemon.process.processes import ProcessState
from lorad.daemon.process.sharing import SharedBox, Users
from lorad.daemon.process.user_threads import UserTurns
from lorad.daemon.runs.versions import is_loaded
from lorad.daemon.serving.completer import add_chunk
from lorad.daemon.storage.prune import is_free, listed
from lorad.errors import Conflict, PoolLost
from lorad.protocol import frames
from lorad.protocol.batch import Chunk
from lorad.protocol.calls import Nothing
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import PoolInfo, PoolStatus, TenantStatus
from lorad.records.versions import Completion
from lorad.store import runs
from lorad.store.versions import get_version
from tests.kit.daemon_world import finished, open_context, until

BOB = 4002
LIMIT = 0.5  # of seconds, for the answer of a pool
INFO = PoolInfo("p", 1, "m", "m", "", "builtin", "builtin", "fused", "cpu", "float32", 1, 1, {})
SETUP = PoolSetup(pool="p", model="m", model_path="m", dtype="float32", owner=BOB)
LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
    time.sleep(3600)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def ctx(home: Path) -> Iterator[Context]:
    made = open_context(home)
    yield made
    made.store.close()
    made.journal.close()


def pool_of_bob(ctx: Context, *loaded: str) -> Pool:
    ctx.users = SharedBox()
    pool = ctx.pools["p"] = Pool(SETUP, ctx.home.pool("p"), ProcessState("alive", 1))
    pool.status = PoolStatus(INFO, [], list(loaded), 0.0, 0.0, 1, 0.0)
    return pool


async def test_claims_of_foreign_pools_do_not_count(ctx: Context) -> None:
    finished(ctx)
    row, pool = get_version(ctx.store, "a", 1002), pool_of_bob(ctx, "a@1002")
    assert not is_loaded(ctx, row) and not version_view(ctx, row).loaded
    assert is_free(ctx, runs.get(ctx.store, "a"), 1002)
    pool.status = None  # nor does it keep files by saying nothing
    assert is_free(ctx, runs.get(ctx.store, "a"), 1002)
    ctx.users = Users()
    assert not is_free(ctx, runs.get(ctx.store, "a"), 1002)


@pytest.mark.parametrize("seconds", [0, 3600])
async def test_check_leaves_no_user_process_behind(seconds: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    argv = [sys.executable, "-c", LEAVES, str(note), str(seconds)]
    async with under_guard(argv, os.environ) as process:
        await until(lambda: note.exists() and note.read_text().strip())
        if not seconds:
            await asyncio.wait_for(process.wait(), 10)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


async def test_a_check_ends_with_the_daemon(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def check() -> None:
        async with under_guard([sys.executable, "-c", LEAVES, str(note), "3600"], os.environ):
            await asyncio.sleep(3600)

    checking = asyncio.create_task(check())
    pid = int(await until(lambda: note.exists() and note.read_text().strip()))
    checking.cancel()
    await asyncio.sleep(0)
    checking.cancel()  # as asyncio.run does, after the handlers were told
    with pytest.raises(asyncio.CancelledError):
        await checking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_check_cancelled_while_it_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, start = tmp_path / "pid", asyncio.create_subprocess_exec

    async def cancelled_before_it_returns(*argv: str, **options: Any) -> Process:
        process = await start(*argv, **options)
        await until(lambda: note.exists() and note.read_text().strip())
        checking.cancel()
        await asyncio.sleep(0)
        return process

    async def check() -> None:
        async with under_guard([sys.executable, "-c", LEAVES, str(note), "3600"], os.environ):
            raise AssertionError("it was cancelled before")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", cancelled_before_it_returns)
    checking = asyncio.create_task(check())
    with pytest.raises(asyncio.CancelledError):
        await checking
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


async def test_user_has_limited_turns_and_bounded_queue() -> None:
    turns, begun, let_go = UserTurns("checks", at_once=2, most=3), list[str](), asyncio.Event()

    async def check(name: str, uid: int) -> None:
        async with turns.turn(uid):
            begun.append(name)
            await let_go.wait()

    checks = [asyncio.create_task(check(name, BOB)) for name in "abc"]
    checks.append(asyncio.create_task(check("other", 0)))
    await until(lambda: len(begun) == 3)
    with pytest.raises(Conflict, match="2 checks are under way, 1 more wait"):
        await check("d", BOB)
    assert begun == ["a", "b", "other"]
    let_go.set()
    await asyncio.gather(*checks)
    assert begun[-1] == "c"
    await check("d", BOB)


async def test_hanging_pool_is_asked_and_awaited_once(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = pool_of_bob(ctx), list[socket.socket]()
    monkeypatch.setattr("lorad.daemon.pools.life.look_at_process", lambda *_: None)
    monkeypatch.setattr("lorad.daemon.pools.life.ANSWER_SECONDS", LIMIT)
    pool.setup, ctx.users = msgspec.structs.replace(SETUP, socket=str(ctx.home.root / "s")), Users()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(pool.setup.socket)
        listener.listen(64)
        threading.Thread(target=lambda: asked.append(listener.accept()[0])).start()
        began = time.monotonic()
        await asyncio.gather(*(ask_status(ctx, pool) for _ in range(20)))
        assert time.monotonic() - began < 2 * 3 * LIMIT and pool.is_slow
        listener.setblocking(False)
        listener.accept()[0].close()  # the second question, for all nineteen
        with pytest.raises(BlockingIOError):
            listener.accept()
        pool.polled_at, began = 0.0, time.monotonic()
        await refresh(ctx)
        assert time.monotonic() - began < LIMIT / 2
    asked[0].close()


async def test_pool_view_hides_claimed_runs_of_others(ctx: Context) -> None:
    finished(ctx)
    pool = pool_of_bob(ctx, "a@1002")
    assert pool.status
    pool.status = msgspec.structs.replace(pool.status, tenants=[TenantStatus("a", 1, "idle", 1)])
    assert (pool_view(ctx, pool).loaded, pool_view(ctx, pool).tenants) == ([], [])
    pool.setup = msgspec.structs.replace(SETUP, owner=os.getuid())
    assert (pool_view(ctx, pool).loaded, pool_view(ctx, pool).tenants) == (["a@1002"], ["a"])


def test_an_answer_of_gigabytes_is_not_waited_for(ctx: Context) -> None:
    pool = pool_of_bob(ctx)
    pool.setup, ctx.users = msgspec.structs.replace(SETUP, socket=str(ctx.home.root / "s")), Users()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(pool.setup.socket)
        listener.listen()
        with connection_to(ctx, pool, 10) as connection:
            there = listener.accept()[0]
            there.sendall(frames.PREFIX.pack(8, 0, 8 << 30))
            with pytest.raises(PoolLost, match="a frame of 8589934592 bytes"):
                connection.call("status", Nothing())
            there.close()


def test_completions_beyond_what_was_asked_for_are_refused() -> None:
    found = {("p", 0): Completion("", [1])}
    tokens = np.arange(2, dtype=np.int32)
    add_chunk(Chunk("p", 0, "a@1", tokens, np.zeros(2, np.float32)), found, 3)
    assert found["p", 0].tokens == [1, 0, 1]
    for index in (0, 7):
        with pytest.raises(PoolLost, match="more than it was asked for"):
            add_chunk(Chunk("p", index, "a@1", tokens, np.zeros(2, np.float32)), found, 3)


def test_endless_directory_is_listed_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    monkeypatch.setattr("lorad.daemon.storage.prune.LISTED", 5)
    assert len(listed(tmp_path)) == 5 and listed(tmp_path / "1") == listed(tmp_path / "none") == []
