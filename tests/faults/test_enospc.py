"""A full disk: what the daemon does, and a short version of `make enospc`."""

import os
import random
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from faults.enospc import NoMount, filled, undisturbed
from lorad.daemon.process.processes import read_status
from lorad.errors import LoradError, StorageError
from lorad.store import runs
from tests.daemon.test_broken_files import has_begun
from tests.kit.daemon_world import (
    finished,
    open_context,
    reconciling,
    serving,
    submit,
    until,
    until_state,
)

pytestmark = pytest.mark.system


@pytest.mark.long
def test_full_disk_changes_no_bytes_of_a_run() -> None:
    try:
        told, wrong = filled("checkpoint", random.Random(0), undisturbed())
    except NoMount as error:
        pytest.skip(f"no small filesystem can be mounted: {error}")
    assert not wrong, told


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No file grows beyond the size of this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_database_holds_nothing_the_journal_lacks(home: Path) -> None:
    ctx = open_context(home)
    finished(ctx)
    before = ctx.home.journal.read_bytes()
    with full(ctx.home.journal), pytest.raises((StorageError, LoradError)):
        finished(ctx, "b")
    assert [run.name for run in runs.list_runs(ctx.store, all=True)] == ["a"]
    assert ctx.home.journal.read_bytes() == before
    finished(ctx, "c")
    assert {run.name for run in runs.list_runs(ctx.store, all=True)} == {"a", "c"}
    ctx.readers.close()
    ctx.store.close()
    ctx.journal.close()


async def test_end_on_a_full_disk_says_so(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer={"steps": 100_000})
        await until(partial(has_begun, ctx, "a"))
        with full(ctx.home.journal):
            driver = read_status(runs.get(ctx.store, "a").attempt_dir)
            assert driver is not None
            os.kill(driver["pid"], signal.SIGKILL)
            await until(lambda: ("_reap_run", "run a") in ctx.loop.troubles)
        await until_state(ctx, "a", "ended")
        assert re.search(
            rf"; meanwhile .*{ctx.home.root}/(lorad\.db|journal)", runs.get(ctx.store, "a").detail
        )


async def test_daemon_on_a_full_disk_answers_reads(home: Path) -> None:
    """A write is refused with its reason, and succeeds once there is room."""
    async with serving(home) as api:
        finished(api.ctx)
        api.ctx.store.empty_wal()
        with full(api.ctx.home.journal):
            with pytest.raises(LoradError) as refused:
                await api("pin", "a@1001")
            assert "journal.jsonl" in refused.value.message and "Free some space" in refused.value.hint
            assert (await api("show", "a")).state == "ended" and len(await api("adapters", "a")) == 6
            assert not (await api("adapters", "a"))[0].pinned
        assert (await api("pin", "a@1001")).pinned
