"""Pins, aliases and their swaps: what they keep loaded, who is notified,
and that a failure changes nothing.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lorad.bounds import FOREIGN_ALIASES
from lorad.daemon import reconcile
from lorad.daemon.access import must_move
from lorad.daemon.api.verbs.aliases import move
from lorad.daemon.process.sharing import SharedBox, Users
from lorad.daemon.process.users import Caller
from lorad.daemon.serving.table import keep_table
from lorad.errors import AttestationFailed, Conflict, IntegrityError, LoradError, NotFound, SpecError
from lorad.store import events, runs
from lorad.store.versions import get_version
from tests.kit.daemon_world import Api, behave, finished, serving, submit, until, until_state
from tests.kit.world import SMALL, world


def table(home: Path) -> Any:
    return json.loads((home / "gateway" / "table.json").read_text())


def kept(api: Api) -> list[str]:
    """In the only pool, as it says itself."""
    (loaded,) = (api.ctx.home.pools).glob("*/loaded.json")
    return sorted(name for name, is_kept in json.loads(loaded.read_text() or "{}").items() if is_kept)


def spoil(home: Path, version: int, run: str = "a") -> None:
    path = home / "runs" / run / "versions" / f"{version:06d}" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def test_swap_moves_alias_and_names_previous_version(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        first = await api("swap", "bot", "a@1003")
        assert (first.run, first.version, first.previous) == ("a", 1003, None)
        second = await api("swap", "bot", "a")
        assert (second.version, second.previous, second.attestation.verdict) == (1006, "a@1003", "passed")
        await until(lambda: (status := api.ctx.pools["tiny-1"].status) and "a@1006" in status.loaded)
        assert [(row.alias, row.version, row.loaded) for row in await api("aliases")] == [("bot", 1006, True)]
        moves = await api("alias_moves", "bot")
        assert [(move.version, move.by) for move in moves] == [(1006, second.by), (1003, first.by)]
        told = [event.data for event in events.after(api.ctx.store, 0, "a") if event.kind == "alias"]
        assert [(data["version"], data["previous"]) for data in told] == [(1003, None), (1006, "a@1003")]


async def test_rollback_goes_to_the_version_before_and_back(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with pytest.raises(NotFound, match="no alias bot"):
            await api("swap", "bot", rollback=True)
        await api("swap", "bot", "a@1001")
        with pytest.raises(NotFound, match="has served a@1001 only"):
            await api("swap", "bot", rollback=True)
        for version in (1002, 1002, 1003):
            await api("swap", "bot", f"a@{version}")
        found = [(await api("swap", "bot", rollback=True)).version for _ in range(3)]
        assert found == [1002, 1003, 1002]
        await api("remove_alias", "bot")
        await api("swap", "bot", "a@1001")
        with pytest.raises(NotFound, match="only"):
            await api("swap", "bot", rollback=True)
        assert [move.version for move in await api("alias_moves", "bot")][:2] == [1001, None]


async def test_refused_swap_changes_nothing_and_says_why(home: Path) -> None:
    behave(home, pool={"refuses": ["a@1002"]})
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "bot", "a@1001")
        before = await api("aliases"), table(home)["aliases"]
        spoil(home, 1003)
        for version, error, why in (
            ("a@1002", AttestationFailed, "bot still serves a@1001: a@1002 is not what it should be"),
            ("a@1003", IntegrityError, "bot still serves a@1001: .*changed bytes"),
            ("a@77", NotFound, "no version a@77"),
            ("b", NotFound, "no alias and no run is named b"),
        ):
            with pytest.raises(error, match=why):
                await api("swap", "bot", version)
        assert (await api("aliases"), table(home)["aliases"], kept(api)) == (*before, ["a@1001"])
        assert len(await api("alias_moves", "bot")) == 1


async def test_replaced_tensors_are_refused_though_their_manifest_fits(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        versions = home / "runs" / "a" / "versions"
        (versions / "001003").rename(versions / "aside")
        (versions / "001002").rename(versions / "001003")
        with pytest.raises(IntegrityError, match=r"bot was not made: .*its tensors have sha256"):
            await api("swap", "bot", "a@1003")


async def test_names_of_aliases_are_checked(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        for name in ("a@3", "base", "Base", ".."):
            with pytest.raises(LoradError):
                await api("swap", name, "a")
        with pytest.raises(SpecError, match="give a version"):
            await api("swap", "bot")
        assert await api("aliases") == []


async def test_alias_precedes_a_run_of_its_name(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "a", "a@1002")
        answer = await api("serving", "a")
        assert (answer.run, answer.version, answer.chat_template) == ("a", 1002, False)
        assert answer.socket == api.ctx.pools["tiny-1"].setup.socket and answer.model_path.endswith("tiny")


async def test_version_written_just_now_is_served(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        submit(api.ctx, "a")
        await until_state(api.ctx, "a", "running")
        for seconds in ("_GLANCE", "REST"):
            monkeypatch.setattr(f"lorad.daemon.loop.{seconds}", 1000.0)  # nobody looks at the journal
        journal = runs.get(api.ctx.store, "a").dir.journal
        await until(lambda: b'"version":1006' in journal.read_bytes().replace(b" ", b""))
        assert (await api("serving", "a@1006")).version == 1006
        with pytest.raises(NotFound):
            await api("serving", "a@1099")


async def test_swaps_of_one_alias_go_one_after_another(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        done = await asyncio.gather(*(api("swap", "bot", f"a@{1001 + n}") for n in range(3)))
        moves = await api("alias_moves", "bot")
        chain = [f"a@{move.version}" for move in reversed(moves)]
        assert sorted(str(row.previous) for row in done) == sorted(["None", *chain[:-1]])
        await until(lambda: kept(api) == chain[-1:])


async def test_gateway_table_is_current_after_a_swap(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with monkeypatch.context() as patch:
            # it would write it a moment later
            for verbs in ("PASS", "ON_GROWTH"):
                others = tuple(verb for verb in getattr(reconcile, verbs) if verb is not keep_table)
                patch.setattr(reconcile, verbs, others)
            await api("pin", "a@1001")
            await api("swap", "bot", "a@1002")
            told = table(home)
        assert (told["aliases"], list(told["versions"])) == ({"bot": "a@1002"}, ["a@1001", "a@1002"])
        entry = told["versions"]["a@1002"]
        assert (entry["run"], entry["version"], entry["owner_uid"]) == ("a", 1002, os.getuid())
        assert (entry["socket"], entry["path"][-6:]) == (api.ctx.pools["tiny-1"].setup.socket, "001002")
        await api("stop_pool", "tiny-1")
        await until(lambda: table(home)["versions"]["a@1002"]["socket"] is None)
        await api("unpin", "a@1001")
        await api("remove_alias", "bot")
        assert table(home) == {"aliases": {}, "versions": {}}


async def test_only_pinned_and_aliased_versions_stay_loaded(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("serving", "a")  # the pool is up
        assert (await api("pin", "a@1003")).pinned
        await until(lambda: kept(api) == ["a@1003"])
        await api("swap", "bot", "a@1001")
        await api("swap", "bot", "a@1002")
        await until(lambda: kept(api) == ["a@1002", "a@1003"])
        await api("unpin", "a@1003")
        await until(lambda: kept(api) == ["a@1002"])
        os.kill(api.ctx.pools["tiny-1"].process.pid or 0, signal.SIGKILL)
        await until(lambda: not api.ctx.pools["tiny-1"].process.is_up)
        await api("serving", "a@1005")
        await until(lambda: kept(api) == ["a@1002"])
        kinds = [event.kind for event in events.after(api.ctx.store, 0, "a") if "pin" in event.kind]
        assert kinds == ["pin", "unpin"]


async def test_refusal_of_a_pin_warns_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.daemon.serving.keep_loaded._FIRST_PAUSE", 3600.0)
    behave(home, pool={"refuses": ["a@1002"]})
    async with serving(home) as api:
        finished(api.ctx)
        await api("serving", "a")  # the pool is up
        await api("pin", "a@1002")
        await api("pin", "a@1003")
        await until(lambda: kept(api) == ["a@1003"])
        pool = api.ctx.pools["tiny-1"]
        for _ in range(3):
            api.ctx.serving.served += 1
            api.ctx.loop.poke()
            await until(lambda: pool.held_at[1] == api.ctx.serving.served and not pool.is_holding)
        assert pool.refusals["a@1002"].times == 1
        (warning,) = (await api("show", "a")).warnings
        assert "a@1002 is pinned, but pool tiny-1 does not keep it loaded: a@1002 is not what" in warning


async def test_pin_beyond_room_warns_until_room_frees(home: Path) -> None:
    behave(home, pool={"capacity": {"max_versions": 2, "versions": 0, "max_rank": 64}})
    async with serving(home) as api:
        finished(api.ctx)
        await api("serving", "a")  # the pool is up
        for number in (1001, 1002, 1003):
            await api("pin", f"a@{number}")
        await until(lambda: "a@1003" in api.ctx.pools["tiny-1"].warned)
        await until(lambda: kept(api) == ["a@1001", "a@1002"])
        assert "a@1003 is pinned, but pool tiny-1" in (await api("show", "a")).warnings[0]
        await api("unpin", "a@1001")
        await until(lambda: kept(api) == ["a@1002", "a@1003"])


async def test_a_version_without_files_cannot_be_pinned(home: Path) -> None:
    behave(home, driver={"without_files": [1003]})
    async with serving(home) as api:
        finished(api.ctx)
        with pytest.raises(Conflict, match="files of a@1003 are gone") as raised:
            await api("pin", "a@1003")
        assert "lorad adapters a" in raised.value.hint
        assert [version.pinned for version in await api("adapters", "a")] == [False] * 6


async def test_pinned_or_aliased_run_is_not_removed(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("pin", "a@1001")
        await api("swap", "bot", "a@1002")
        with pytest.raises(Conflict, match="alias bot serves a version of run a"):
            await api("remove", "a")
        await api("remove_alias", "bot")
        with pytest.raises(Conflict, match="pinned: a@1001"):
            await api("remove", "a")
        await api("unpin", "a@1001")
        await api("remove", "a")


@pytest.mark.system
def test_serving_survives_pool_kill_gc_and_rollback() -> None:
    with world() as made:
        made.run("a", "trainer.steps=3", "checkpoint.keep_versions=1", text=SMALL)
        made.client.pin("a@2")
        assert made.client.swap("bot", "a@2").attestation.verdict == "passed"
        assert made.client.swap("bot", "a@3").previous == "a@2"
        assert "bot serves a@2, before a@3 (" in made.lorad("swap", "bot", "--rollback").stderr
        assert "bot serves a@2, as before (" in made.lorad("swap", "bot", "a@2").stderr
        made.lorad("swap", "bot", "a@9", expect=3)
        assert made.json("generate", "bot", "3 1 2")["version"] == "a@2"
        (pool,) = made.client.pools()
        os.kill(pool.pid or 0, signal.SIGKILL)
        made.until(lambda: not made.client.pools(), "the pool is gone")
        made.client.swap("other", "a@3")
        made.until(lambda: {"a@2", "a@3"} <= set(made.client.pools()[0].loaded), "both are loaded again")
        gone = {Path(item.path).name for item in made.client.gc().deleted}
        assert gone <= {"000000", "000001"} and made.client.gc().deleted == []
        told = made.lorad("adapters", "a", COLUMNS="200").stdout
        assert "pinned, bot" in told and "other" in told
        assert made.lorad("verify", "a").stdout.count("\N{CHECK MARK}") == 8
        assert [move.version for move in made.client.alias_moves("bot")] == [2, 3, 2]


async def test_foreign_aliases_are_limited_and_block_removal(home: Path) -> None:
    eve, ann = Caller(4002, "eve"), Caller(4001, "ann")
    async with serving(home) as api:
        ctx = api.ctx
        finished(ctx)
        with ctx.store.write() as connection:
            connection.execute("UPDATE runs SET owner = 'ann', owner_uid = 4001")
        ctx.users = SharedBox()
        version = get_version(ctx.store, "a", 1001)
        for number in range(FOREIGN_ALIASES):
            must_move(ctx, eve, f"e{number}", None, runs.get(ctx.store, "a"))
            move(ctx, f"e{number}", version, by=eve)
        must_move(ctx, ann, "bot", None, runs.get(ctx.store, "a"))
        with pytest.raises(Conflict, match="eve has 16 aliases, 16 of them for versions of others"):
            must_move(ctx, eve, "one-more", None, runs.get(ctx.store, "a"))
        with pytest.raises(Conflict, match="aliases e0 of eve, e1 of eve"):
            runs.remove(ctx.store, "a")


async def test_rollbacks_to_foreign_versions_are_limited_too(home: Path) -> None:
    eve = Caller(4002, "eve")
    async with serving(home) as api:
        ctx = api.ctx
        finished(ctx, "b")
        finished(ctx, "a")
        with ctx.store.write() as connection:
            connection.execute("UPDATE runs SET owner = 'eve', owner_uid = 4002 WHERE name = 'b'")
        ctx.users = SharedBox()
        for number in range(FOREIGN_ALIASES):
            for version in (get_version(ctx.store, "a", 1001), get_version(ctx.store, "b", 1001)):
                move(ctx, f"e{number}", version, by=eve)
        with pytest.raises(Conflict, match="eve has 16 aliases, 16 of them for versions of others"):
            must_move(ctx, eve, "one-more", None, runs.get(ctx.store, "a"))
        must_move(ctx, eve, "one-more", None, runs.get(ctx.store, "b"))
        await api("discard", "a@1001")  # what somebody else would roll back to goes when its owner wants it
        assert not (home / "runs/a/versions/001001").exists()
        ctx.users = Users()
