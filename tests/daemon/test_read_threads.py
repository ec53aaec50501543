"""Questions that take long hold up neither the loop nor the writer, and see what was answered before."""

import asyncio
import contextlib
import itertools
import os
import threading
from pathlib import Path

import pytest

from lorad.daemon import read_threads
from lorad.daemon.read_threads import Readers
from lorad.store import runs, sweeps
from lorad.store.db import Rows, Store
from tests.kit.daemon_world import finished, serving
from tests.kit.journals import new_run
from tests.kit.pool_kit import DEADLINE


class Slow:
    """A question that takes until `let_go`."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, rows: Rows) -> int:
        count = len(rows.rows("SELECT 1 FROM runs"))
        self.began.set()
        self.may_end.wait(30)
        return count + 0 * len(rows.rows("SELECT 1 FROM runs"))


async def begun(slow: Slow) -> None:
    await asyncio.to_thread(slow.began.wait, 30)


async def test_long_read_blocks_nobody_and_sees_snapshot(tmp_path: Path) -> None:
    store, slow = Store(tmp_path / "lorad.db"), Slow()
    new_run(store, "a")
    readers = Readers(store)
    asked = asyncio.create_task(readers.read(slow))
    await begun(slow)
    new_run(store, "b")  # the writer does not wait
    assert len(await readers.read(runs.list_runs, all=True)) == 2  # nor does anybody else
    slow.may_end.set()
    assert await asked == 1
    readers.close()
    store.close()


@pytest.mark.system
async def test_who_has_an_answer_reads_what_it_did(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        for number in range(6):
            version = f"a@{1001 + number // 2}"
            await api("unpin" if number % 2 else "pin", version)
            told = {f"a@{row.version}": row.pinned for row in await api("adapters", "a")}
            assert told[version] == (not number % 2)
            await api("swap", "bot", version)
            assert f"a@{(await api('alias_moves', 'bot'))[0].version}" == version


async def test_reads_wait_until_a_large_wal_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_threads, "WAL_BYTES", 1 << 14)
    monkeypatch.setattr(read_threads, "WAL_TOO_LARGE", 1 << 16)
    store, slow, numbers = Store(tmp_path / "lorad.db"), Slow(), itertools.count()
    readers = Readers(store)
    earlier = asyncio.create_task(readers.read(slow))
    await asyncio.to_thread(slow.began.wait, DEADLINE)
    while readers.wal_bytes() <= 1 << 16:
        new_run(store, f"r{next(numbers)}")
    readers.tidy()
    later = asyncio.create_task(readers.read(runs.list_runs, all=True))
    await asyncio.sleep(0)
    assert readers.active == 1 and readers.wal_bytes()  # the later one has not begun
    slow.may_end.set()
    await earlier
    assert len(await later) == next(numbers) and not readers.wal_bytes()
    readers.close()
    store.close()


async def test_waiting_read_ends_with_the_daemon(tmp_path: Path) -> None:
    store = Store(tmp_path / "lorad.db")
    readers = Readers(store)
    readers._open.clear()
    waiting = asyncio.create_task(readers.read(runs.list_runs, all=True))
    await asyncio.sleep(0)
    readers.close()
    with contextlib.suppress(RuntimeError):  # there is nobody to read any more
        await waiting
    assert waiting.done()
    store.close()


async def test_loop_runs_during_a_long_read(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        slow = Slow()
        asked = asyncio.create_task(api.ctx.read(slow))
        await begun(slow)
        assert (await api("status")).pid and (await api("show", "a")).state == "ended"
        slow.may_end.set()
        assert await asked == 1


async def test_runs_of_sweeps_are_read_beside_the_loop(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    def best(rows: Rows, run: str) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr("lorad.daemon.api.verbs.sweeps.best_eval", best)
    async with serving(home) as api:
        store = api.ctx.store
        finished(api.ctx)
        sweeps.create(store, "g", owner="me", owner_uid=os.getuid(), grid={"seed": ["0"]}, halving=None)
        runs.set_fields(store, "a", sweep="g")
        (shown,) = (await api("sweeps"))[0].runs
        assert (shown.name, shown.values) == ("a", {"seed": 0}) and shown.reward_mean is not None
    assert threads and threading.main_thread() not in threads


def test_list_has_newest_ended_and_all_active_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "lorad.db")
    for number in range(10):
        new_run(store, f"r{number}")
    with store.write() as connection:
        connection.execute(
            "UPDATE runs SET state = 'ended', reason = 'stopped', ended_at = 1e12 WHERE name != 'r0'"
        )
    assert [run.name for run in runs.list_runs(store, all=True, limit=4)] == ["r9", "r8", "r7", "r0"]
    assert [run.name for run in runs.list_runs(store, all=True, limit=1)] == ["r0"]
    assert len(runs.list_runs(store, all=True)) == 10
    store.close()
