"""What one user may have at a time: more than that waits, says why, and delays nobody else."""

import math
import os
from pathlib import Path

import pytest

from lorad.box.config import Config, Limit, Queue, Sharing
from lorad.daemon.context import Context
from lorad.daemon.pools import life
from lorad.daemon.process.sharing import SharedBox
from lorad.daemon.process.users import Caller
from lorad.daemon.queue import place, shares, snapshot
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.queue.place import place_runs
from lorad.daemon.state import bytes_of
from lorad.errors import NotAllowed
from lorad.spec.model import convert
from lorad.states import EndReason, Move
from lorad.store import runs
from tests.kit.daemon_world import idle_pools, open_context, reconciling, submit, until, until_state
from tests.kit.fakes.gpu_kit import gpus, taken


def told(ctx: Context, name: str) -> str:
    return str(runs.get(ctx.store, name).waiting)


def working(ctx: Context) -> list[str]:
    return sorted(str(row.name) for row in runs.list_runs(ctx.store, all=True) if row.state == "starting")


def owned(ctx: Context, user: str, uid: int, *names: str, **sections: object) -> None:
    for name in names:
        submit(ctx, name, **sections)  # type: ignore[arg-type]
        with ctx.store.write() as connection:
            connection.execute("UPDATE runs SET owner = ?, owner_uid = ? WHERE name = ?", (user, uid, name))


def test_user_at_run_limit_waits_blocking_nobody(home: Path) -> None:
    ctx = open_context(home, queue=Queue(limits=Limit(runs=2), users={"root": Limit()}))
    owned(ctx, "alice", os.getuid(), "a1", "a2")
    place_runs(ctx)
    owned(ctx, "alice", os.getuid(), "a3", resources={"exclusive": True, "priority": 9})
    owned(ctx, "bob", 4321, "b1")
    owned(ctx, "root", 0, "r1", "r2", "r3", model="/models/more")
    place_runs(ctx)
    assert working(ctx) == ["a1", "a2"] and told(ctx, "a3") == "alice has 2 of 2 runs working"
    # not a3 is next
    assert told(ctx, "b1") == "pool tiny-1 is busy with runs a1 and a2; starts when they end"
    for name in ("a1", "a2"):
        runs.move(ctx.store, name, Move.END, reason=EndReason.STOPPED)
    place_runs(ctx)
    assert working(ctx) == ["a3"]
    runs.move(ctx.store, "a3", Move.END, reason=EndReason.STOPPED)
    runs.move(ctx.store, "b1", Move.END, reason=EndReason.STOPPED)
    place_runs(ctx)
    assert working(ctx) == ["r1", "r2", "r3"]


def test_device_limit_spares_runs_in_warm_pools(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = open_context(home, queue=Queue(limits=Limit(devices=1)))
    gpus(ctx, 3, monkeypatch, tmp_path)
    submit(ctx, "one", model="/models/one")
    place_runs(ctx)
    submit(ctx, "again", model="/models/one")
    submit(ctx, "two", model="/models/two")
    place_runs(ctx)
    assert "me has 1 of 1 device" in told(ctx, "two") and working(ctx) == ["again", "one"]
    owned(ctx, "bob", 4321, "other", model="/models/two")
    place_runs(ctx)
    assert working(ctx) == ["again", "one", "other"]
    ctx.config = Config(queue=Queue(limits=Limit(devices=0)))
    submit(ctx, "more", model="/models/one", resources={"priority": 1})
    place_runs(ctx)
    assert "more" in working(ctx)


async def test_own_idle_pools_make_room_at_limit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home, queue=Queue(limits=Limit(devices=2))) as ctx:
        gpus(ctx, 4, monkeypatch, tmp_path)
        for name, uid in (("a", os.getuid()), ("b", 4321), ("c", os.getuid())):
            owned(ctx, name, uid, name, model=f"/models/{name}")
            await until_state(ctx, name, "ended")
        # beside its user's two there are no two
        submit(ctx, "wide", trainer={"backend": "fsdp", "steps": 6, "dp": 2})
        assert (await until_state(ctx, "wide", "ended")).reason == "completed"
        assert [pool.id for pool in ctx.pools.values() if pool.process.is_up] == ["b-1", "tiny-1"]


async def test_idle_pool_stays_while_another_clears_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home) as ctx:
        gpus(ctx, 2, monkeypatch, tmp_path)
        await idle_pools(ctx, "a", "b")
        await life.end_pools(ctx, [ctx.pools["a-1"]])
        await until(lambda: not ctx.pools["a-1"].is_leaving)
        ctx.pools["a-1"].clears_up_until = math.inf
        with taken(ctx.gpus.devices[0]):  # by what the pool left behind
            submit(ctx, "c", model="/models/c")
            await until(lambda: "cuda:0 is in use" in told(ctx, "c"))
        ctx.pools["a-1"].clears_up_until = 0.0
        await until_state(ctx, "c", "ended")
        assert ctx.pools["b-1"].process.is_up and ctx.pools["c-1"].setup.names == ("cuda:0",)


async def test_user_over_disk_limit_waits_for_room(home: Path) -> None:
    async with reconciling(home, queue=Queue(limits=Limit(disk=1 << 20))) as ctx:
        submit(ctx, "a")
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        (ctx.home.run("a").root / "big").write_bytes(b"x" * (2 << 20))
        ctx.storage.by_owner.used, ctx.storage.by_owner.at = {}, float("-inf")
        submit(ctx, "b")
        await until(lambda: "of 1.0 MiB on disk; `lorad gc` and `lorad rm` free some" in told(ctx, "b"))
        (ctx.home.run("a").root / "big").unlink()
        ctx.storage.by_owner.at = float("-inf")
        assert (await until_state(ctx, "b", "ended")).reason == "completed"


def test_files_with_several_names_and_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = bytes_of([tmp_path])
    (tmp_path / "a" / "file").write_bytes(b"x" * 8192)
    os.link(tmp_path / "a" / "file", tmp_path / "a" / "b" / "again")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert 8192 <= bytes_of([tmp_path, tmp_path / "gone"]) - before < 16384


def test_users_with_runs_in_the_queue_take_turns(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "TURN", 2)
    ctx = open_context(home)
    owned(ctx, "eve", 4002, *(f"e{number}" for number in range(1, 7)))
    place_runs(ctx)
    owned(ctx, "eve", 4002, "e7", "e8")
    owned(ctx, "ann", 4001, "a1", "a2", "a3")
    assert len(working(ctx)) == 6  # nobody else waited
    for name in ("e1", "e2", "e3", "e4", "e5"):
        runs.move(ctx.store, name, Move.END, reason=EndReason.STOPPED)
        place_runs(ctx)
        assert "e7" not in working(ctx) and told(ctx, "e7").startswith("run a1 is next")
    runs.move(ctx.store, "e6", Move.END, reason=EndReason.STOPPED)
    place_runs(ctx)
    assert working(ctx) == ["a1", "a2"] and told(ctx, "a3").startswith("run e7 is next")


def test_long_queue_is_examined_only_in_part(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LOOKED_AT", 3)
    ctx = open_context(home)
    owned(ctx, "eve", 4002, *(f"e{number}" for number in range(6)), resources={"exclusive": True})
    place_runs(ctx)
    assert working(ctx) == ["e0"] and told(ctx, "e2").startswith("run e1 is next")
    assert told(ctx, "e3") == told(ctx, "e5") == place.FAR_BACK
    runs.move(ctx.store, "e0", Move.END, reason=EndReason.STOPPED)
    place_runs(ctx)
    assert working(ctx) == ["e1"] and told(ctx, "e3").startswith("run e2 is next")


def test_shared_daemon_caps_priority_per_user(home: Path) -> None:
    ctx = open_context(home, queue=Queue(users={"bob": Limit(priority=5)}), sharing=Sharing(admins=["ada"]))
    wanted = convert({"resources": {"priority": 5}})
    refuse_priority(ctx, Caller(4001, "ann"), wanted)  # who has the daemon alone
    ctx.users = SharedBox()
    for uid, name in ((4002, "bob"), (4003, "ada"), (0, "root")):
        refuse_priority(ctx, Caller(uid, name), wanted)
    refuse_priority(ctx, Caller(4001, "ann"), convert({"resources": {"priority": -5}}))
    with pytest.raises(NotAllowed, match="ann's runs may have 0 at most"):
        refuse_priority(ctx, Caller(4001, "ann"), wanted)


def test_long_pass_leaves_the_rest_to_the_next(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "PLACE_SECONDS", -1)
    ctx = open_context(home)
    owned(ctx, "ann", 4001, "a1", "a2", "a3")
    for placed in (["a1"], ["a1", "a2"], ["a1", "a2", "a3"]):
        place_runs(ctx)
        assert working(ctx) == placed
