"""Two daemons on one machine: each respects what the other holds, says so, and gets it when it is idle."""

import json
import os
from pathlib import Path

import pytest

from lorad.box.config import Queue
from lorad.daemon.api.verbs.box import list_devices
from lorad.daemon.context import Context
from lorad.daemon.gpu import devices
from lorad.daemon.gpu.lock_notes import note_path
from lorad.daemon.guarded import guarded
from lorad.daemon.pools import life
from lorad.daemon.queue import snapshot
from lorad.daemon.queue.device_holders import keep_leases
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.restart import futile_attempts
from lorad.daemon.troubles import Item
from lorad.store import runs
from tests.kit.daemon_world import hold, open_context, reconciling, release, submit, until, until_state
from tests.kit.fakes.gpu_kit import NO_QUERY, gpus, leave, note, taken


def told(ctx: Context, name: str) -> str:
    return str(runs.get(ctx.store, name).waiting)


@pytest.fixture
def other(home: Path) -> Path:
    """A second home, of a second daemon."""
    path = home / "other"
    path.mkdir()
    return path


async def test_gpu_changes_daemons_only_once_idle(
    home: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(home)
    quick = Queue(idle_timeout_wanted=0.2)
    async with reconciling(home, queue=quick) as first, reconciling(other) as second:
        for ctx in (first, second):
            gpus(ctx, 1, monkeypatch, tmp_path)
        submit(first, "arith")
        await until_state(first, "arith", "running")
        await until(lambda: note_path(home, "GPU-0", "holder").exists())
        submit(second, "b")
        whose = (
            f"cuda:0 held by pool tiny-1 (root, uid {os.getuid()}, run arith)"
            if os.getuid() == 0
            else "run arith)"
        )
        await until(lambda: whose in told(second, "b"))
        assert told(second, "b").endswith(", free after 10m idle")
        (found,) = await list_devices(second, NO_QUERY)
        assert found.lease is not None
        assert (found.pool, found.lease.pool, found.lease.why) == (None, "tiny-1", "run arith")
        release(home)
        assert (await until_state(first, "arith", "ended")).reason == "completed"
        assert (await until_state(second, "b", "ended")).reason == "completed"
        assert not note_path(other, "GPU-0", "wanted").exists()
        assert not first.pools["tiny-1"].process.is_up


async def test_idle_pool_stays_warm_while_nobody_waits(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home, queue=Queue(idle_timeout_wanted=0.1)) as ctx:
        gpus(ctx, 1, monkeypatch, tmp_path)
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
        path = note_path(home, "GPU-0", "holder")
        note = await until(
            lambda: path.exists() and (n := json.loads(path.read_bytes()))["why"] == "idle" and n
        )
        assert note["idle_since"] >= note["since"] and note["pid"] == ctx.pools["tiny-1"].process.pid
        ctx.loop.poke()
        await until(lambda: ctx.pools["tiny-1"].idle_seconds > 0.5)
        assert ctx.pools["tiny-1"].process.is_up
        ctx.config = type(ctx.config)(idle_timeout=0.1)
        ctx.loop.poke()
        await until(lambda: not ctx.pools["tiny-1"].process.is_up)
        ctx.loop.poke()
        await until(lambda: not path.exists())


async def test_run_beaten_to_a_gpu_waits_unharmed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "LOCK_SECONDS", 0)
    async with reconciling(home) as ctx:
        gpus(ctx, 1, monkeypatch, tmp_path)
        with taken(ctx.gpus.devices[0]):
            with monkeypatch.context() as blind:
                blind.setattr(snapshot, "is_taken", lambda device: False)
                submit(ctx, "a", resources={"restart": "never"})
                await until(lambda: runs.get(ctx.store, "a").state == "starting")
            await until(lambda: "cuda:0 is in use by another process or user" in told(ctx, "a"))
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        assert len(runs.attempts(ctx.store, "a")) == 2 and futile_attempts(ctx, "a", before=2) == 0


def test_only_gpus_of_idle_holders_are_wanted(
    home: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_context(home), open_context(other)
    for ctx in (first, second):
        gpus(ctx, 3, monkeypatch, tmp_path)
    for number, idle in enumerate((None, 5.0, None)):
        leave(
            note_path(home, f"GPU-{number}", "holder"), note(why="idle" if idle else "run x", idle_since=idle)
        )
    submit(second, "b")
    with taken(second.gpus.devices[0]), taken(second.gpus.devices[1]), taken(second.gpus.devices[2]):
        place_runs(second)
        assert list(second.gpus.notes.wanted) == ["GPU-1"]
        assert told(second, "b").startswith("0 of 3 devices free; cuda:0 held by pool qwen-1 (me, uid ")
        assert told(second, "b").count("held by") == 3
    place_runs(second)
    assert told(second, "b") == "" and runs.get(second.store, "b").state == "starting"


def test_unwritable_lease_note_becomes_a_trouble(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = open_context(home)
    gpus(ctx, 1, monkeypatch, tmp_path)
    ctx.gpus.notes.wanted["GPU-0"] = "run a"
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "no" / "such")
    guarded(ctx, Item(), keep_leases)
    assert "No such file or directory" in ctx.loop.troubles.lines()[0]


def test_next_daemon_clears_its_old_notes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = open_context(home)
    gpus(ctx, 1, monkeypatch, tmp_path)
    left = [leave(note_path(home, "GPU-0", kind), note()) for kind in ("holder", "wanted")]
    theirs = leave(note_path(Path("/another"), "GPU-0", "holder"), note())
    keep_leases(ctx)
    assert not any(path.exists() for path in left) and theirs.exists()
