"""The daemon as its clients see it: every request of the API."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lorad.adapters.directory import write_directory
from lorad.errors import Conflict, IntegrityError, NotFound, SpecError
from tests.kit.daemon_world import behave, finished, serving, until


async def test_a_run_is_queued_shown_and_listed(home: Path) -> None:
    async with serving(home) as api:
        made = await api.run("a")
        assert (made.state, made.name, made.steps) == ("queued", "a", 6)
        shown = await api.until("a", "ended")
        assert (shown.reason, shown.spec["trainer"]["steps"], shown.processes) == ("completed", 6, [])
        assert [run.name for run in await api("list")] == ["a"]
        assert [a.reason for a in shown.attempts] == ["completed"]


async def test_request_says_where_paths_begin(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        assert (await api.until("a", "ended")).cwd == "/"
        (home / "runs" / "a" / "request.json").unlink()
        assert (await api("show", "a")).cwd is None


async def test_a_run_without_a_name_gets_one(home: Path) -> None:
    async with serving(home) as api:
        first, second = [(await api.run(None)).name for _ in range(2)]
        assert (first.count("-"), first != second) == (2, True)


async def test_a_name_is_used_once(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        with pytest.raises(Conflict, match="named a"):
            await api.run("a")


async def test_a_spec_that_the_preflight_refuses_leaves_nothing(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match="unlucky") as raised:
            await api.run("a", "lora.rank=13")
        assert raised.value.hint == "Take another."
        assert (await api("list"), list((home / "runs").iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("model", "hint"), [("some/model@main", "hf download some/model"), ("builtin:tiny", "reward")]
)
async def test_hanging_check_names_its_likely_cause(home: Path, model: str, hint: str) -> None:
    async with serving(home) as api:
        api.ctx.patience = replace(api.ctx.patience, preflight=0.001)
        with pytest.raises(SpecError, match=r"got no further for .* it was starting") as raised:
            await api.run("a", f"model.path={model}", "data.train=sort")
        assert hint in str(raised.value.hint)


@pytest.mark.system
async def test_a_check_that_gets_on_has_time(home: Path) -> None:
    words = [f"reading rows.jsonl {done} of 9 MB" for done in range(9)]
    behave(home, preflight={"tells": words, "seconds": 1.5})
    async with serving(home) as api:
        api.ctx.patience = replace(api.ctx.patience, preflight=10.0)
        assert (await api.run("a")).name == "a"


async def test_a_check_that_hangs_says_how_far(home: Path) -> None:
    behave(home, preflight={"tells": ["reading rows.jsonl 3 of 9 MB"], "seconds": 60})
    async with serving(home) as api:
        api.ctx.patience = replace(api.ctx.patience, preflight=2.0)
        with pytest.raises(SpecError, match=r"it was reading rows.jsonl 3 of 9 MB") as raised:
            await api.run("a")
        assert "row of the data" in str(raised.value.hint)


async def test_a_wrong_key_is_named_with_its_line(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match=r"a.yaml:2: lora.rnk"):
            await api.run("a", spec="seed: 1\nlora: {rnk: 3}")


async def test_a_running_run_shows_its_processes(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        await api.run("a")
        shown = await api.until("a", "running")
        pids = {process.role: process.pid for process in shown.processes}
        assert set(pids) == {"driver", "driver shim", "pool", "pool shim"}
        assert all(map(alive, pids.values()))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_pause_resume_stop_and_remove(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        await api.run("a", "trainer.steps=1000")
        await api.until("a", "running")
        assert (await api("pause", "a")).state == "stopping"
        paused = await api.until("a", "paused")
        assert (await api("resume", "a")).state == "queued"
        await api.until("a", "running")
        with pytest.raises(Conflict, match="is running"):
            await api("remove", "a")
        await api("stop", "a")
        ended = await api.until("a", "ended")
        assert (ended.reason, ended.step >= paused.step) == ("stopped", True)
        await api("remove", "a")
        with pytest.raises(NotFound):
            await api("show", "a")
        assert list((home / "runs").iterdir()) == []


async def test_queued_runs_pause_and_end_at_once(home: Path) -> None:
    behave(home, driver={"seconds": 30})
    async with serving(home) as api:
        for name in ("busy", "b", "c", "d"):
            await api.run(name, "resources.exclusive=true")
        assert (await api("pause", "b")).state == "paused"
        assert (await api("stop", "c")).reason == "stopped"
        assert (await api("kill", "d")).reason == "killed"
        assert (await api("kill", "b")).reason == "killed"


async def test_resume_refuses_what_cannot_work(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with pytest.raises(Conflict, match="6 steps") as done:
            await api("resume", "a")
        assert "--steps 12" in done.value.hint
        with pytest.raises(NotFound, match="no checkpoint at step 5") as missing:
            await api("resume", "a", step=5, steps=9)
        assert "2, 4, 6" in missing.value.hint


async def test_resume_from_damaged_checkpoint_offers_the_previous(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        newest = Path((await api("checkpoints", "a"))[-1].path)
        (newest / "more").write_text("x")
        with pytest.raises(IntegrityError, match="checkpoint at step 6") as raised:
            await api("resume", "a", steps=9)
        assert "--from 4" in raised.value.hint
        await api("resume", "a", step=4, steps=8)
        ended = await api.until("a", "ended")
        assert (ended.reason, ended.step, ended.attempts[1].resumed_from) == ("completed", 8, 4)


async def test_events_come_as_they_happen(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")

        def follow() -> list[str]:
            kinds = []
            for event in api.client.events(0, run="a"):
                kinds.append(event.kind)
                if event.data.get("state") == "ended":
                    break
            return kinds

        kinds = await asyncio.to_thread(follow)
        assert (kinds[0], kinds.count("step"), kinds[-1]) == ("state", 6, "state")


async def test_steps_samples_versions_and_logs_are_served(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        assert [step.step for step in await api("steps", "a", after=2)] == [3, 4, 5, 6]
        assert [step.step for step in await api("steps", "a", after=2, every=4)] == [4, 6]
        assert await api("samples", "a", step=3) == []
        assert [v.version for v in await api("adapters", "a")] == [1001, 1002, 1003, 1004, 1005, 1006]
        assert (await api("logs", "a", of="pool")).size == 0
        with pytest.raises(NotFound, match="no step 9"):
            await api("samples", "a", step=9)


async def test_changed_samples_are_refused(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        (home / "runs" / "a" / "samples" / "000003.jsonl").write_text("{}")
        with pytest.raises(IntegrityError, match="000003"):
            await api("samples", "a", step=3)


def config(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base@main"}')


async def test_export_writes_whole_versions_to_empty_directories_only(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        source = home / "runs" / "a" / "versions" / "001006"
        shutil.rmtree(source)
        write_directory(source, config)
        done = await api("export", "a@1006", str(home / "out"))
        named = json.loads((home / "out" / "adapter_config.json").read_text())
        assert done.version == "a@1006"
        # as transformers wants it
        assert named == {"base_model_name_or_path": "org/base", "revision": "main"}
        with pytest.raises(Conflict, match="not empty"):
            await api("export", "a@1006", str(home / "out"))
        changed = (source / "adapter_config.json").read_text().replace("main", "evil")
        (source / "adapter_config.json").write_text(changed)
        with pytest.raises(IntegrityError, match="changed bytes"):
            await api("export", "a", str(home / "other"))


@pytest.mark.system
async def test_forced_pool_stop_leaves_a_resumable_run(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        await api("stop_pool", "tiny-1", force=True)
        assert (await api.until("a", "ended")).reason == "lost"
        await api("resume", "a")
        assert (await api.until("a", "ended")).reason == "completed"


async def test_the_daemon_ends_pools_without_work_with_itself(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        told = await api("shutdown", pools=True)
        assert (told.ended, told.staying[0].pool, told.staying[0].runs) == ([], "tiny-1", ["a"])
    async with serving(home) as api:
        await api.until("a", "ended")
        await until(lambda: api.ctx.pools["tiny-1"].state == "ready")
        assert (await api("shutdown", pools=True)).ended == ["tiny-1"]
        assert not api.ctx.pools["tiny-1"].process.is_up


async def test_only_idle_pools_stop_on_request(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        with pytest.raises(Conflict, match="busy with run a") as refused:
            await api("stop_pool", "tiny-1")
        assert "lorad pause a" in refused.value.hint and "--force" in refused.value.hint
        await api("kill", "a")
        await api.until("a", "ended")
        await until(lambda: api.ctx.pools["tiny-1"].state == "ready")
        await api("stop_pool", "tiny-1")
        await until(lambda: not api.ctx.pools["tiny-1"].process.is_up)
        assert await api("pools") == []
