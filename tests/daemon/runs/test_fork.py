"""A fork begins with a version and its optimizer's state, whatever becomes of its parent."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorad.adapters.directory import verify
from lorad.daemon.api.verbs.fork import copy_start
from lorad.errors import Conflict, IntegrityError, NotFound, SpecError
from lorad.records.runs import Forked
from lorad.store import runs
from tests.kit.daemon_world import Api, behave, finished, serving
from tests.kit.world import world


async def parent(api: Api) -> None:
    """`a`, which made 6 steps and has the checkpoints 2, 4 and 6."""
    finished(api.ctx)


async def fork(api: Api, version: str, *overrides: str, **options: Any) -> Forked:
    wanted = {"name": None, "steps": None, "fresh": False} | options
    forked: Forked = await api("fork", version, overrides=[*overrides], **wanted)
    return forked


def params_of(api: Api, name: str) -> dict[str, Any]:
    row = runs.get(api.ctx.store, name)
    found: dict[str, Any] = json.loads((row.attempt_dir.root / "params.json").read_text())
    return found


async def test_fork_is_a_new_run_from_a_checkpoint(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        made = await fork(api, "a@1004", "trainer.lr=1e-5", steps=3)
        assert (made.name, made.steps, made.state) == ("a-fork", 3, "queued")
        shown = await api.until("a-fork", "ended")
        assert (shown.reason, shown.step, shown.origin) == ("completed", 3, "a@1004")
        assert (shown.spec["trainer"]["lr"], shown.spec["checkpoint"]["every"]) == (1e-5, 2)
        params = params_of(api, "a-fork")
        assert (params["start_from"], params["origin"]) == (str(home / "runs/a-fork/origin"), "a@1004")
        told = [event for event in runs_events(api, "a-fork") if event["kind"] == "forked"]
        assert (told[0]["data"]["from"], told[0]["data"]["step"], told[0]["data"]["fresh"]) == (
            "a@1004",
            4,
            False,
        )


def runs_events(api: Api, run: str) -> list[Any]:
    rows = api.ctx.store.rows("SELECT kind, data FROM events WHERE run = ?", (run,))
    return [{"kind": row["kind"], "data": json.loads(row["data"])} for row in rows]


async def test_names_of_forks_are_told_apart(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        assert [(await fork(api, "a")).name for _ in range(2)] == ["a-fork", "a-fork-2"]
        assert (await fork(api, "a", name="b")).name == "b"
        with pytest.raises(Conflict, match="a run named b"):
            await fork(api, "a", name="b")


async def test_fork_without_checkpoint_lists_versions_with_one(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        with pytest.raises(NotFound, match="no checkpoint holds a@1003") as refused:
            await fork(api, "a@1003")
        assert "a@1002, a@1004, a@1006" in refused.value.hint and "--fresh" in refused.value.hint
        assert [run.name for run in await api("list")] == ["a"]


async def test_fresh_fork_takes_weights_of_any_version(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        await fork(api, "a@1003", fresh=True, name="b")
        shown = await api.until("b", "ended")
        assert shown.spec["lora"]["adapter_path"] == str(home / "runs/b/origin")
        assert params_of(api, "b")["start_from"] is None


async def test_the_shape_of_the_adapter_stays(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        for override in ("lora.rank=8", "lora.target_modules=q_proj", "model.path=x", "lora.adapter_path=x"):
            with pytest.raises(SpecError, match=r"is part of what the adapter is"):
                await fork(api, "a@1004", override)
        await fork(api, "a@1004", "lora.rank=16", name="b")  # what it is


@pytest.mark.system
async def test_a_forked_critic_keeps_its_rank(home: Path) -> None:
    ppo = ("algorithm={name: ppo, critic: {warmup_steps: 0}}",)
    async with serving(home) as api:
        await parent(api)
        await fork(api, "a@1004", *ppo, name="b")
        await api.until("b", "ended")
        await fork(api, "b", "algorithm.critic.warmup_steps=5", "algorithm.name=grpo", fresh=True, name="d")
        rates = [(await api("show", name)).spec["algorithm"]["critic"]["lr"] for name in ("b", "d")]
        assert rates == [1.66e-4, None]  # of a model of unknown size
        rank = "algorithm={name: ppo, critic: {rank: 2, warmup_steps: 0}}"
        with pytest.raises(SpecError, match=r"algorithm\.critic\.rank: the critic .* has rank"):
            await fork(api, "b", rank)
        await fork(api, "b", rank, fresh=True)
        await fork(api, "a@1004", rank, name="c")  # which has no critic yet


async def test_fork_outlives_parent_and_restarts_from_origin(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        behave(home, driver={"crash_at": 1})
        await fork(api, "a@1004", name="b")
        assert (await api.until("b", "ended")).reason == "lost"
        await api("remove", "a")
        verify(home / "runs/b/origin")
        behave(home)
        await api("resume", "b")
        assert (await api.until("b", "ended")).reason == "completed"
        assert params_of(api, "b")["start_from"] == str(home / "runs/b/origin")


async def test_run_ignores_origin_of_a_failed_fork(
    home: Path,
) -> None:
    async with serving(home) as api:
        (home / "runs/b/origin").mkdir(parents=True)
        await api.run("b")
        await api.until("b", "ended")
        assert params_of(api, "b")["start_from"] is None


async def test_parent_may_vanish_while_it_is_forked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(home) as api:
        await parent(api)

        async def removed(*arguments: Any, **options: Any) -> Path:
            found = await copy_start(*arguments, **options)
            await api("remove", "a")
            return found

        monkeypatch.setattr("lorad.daemon.api.verbs.fork.copy_start", removed)
        await fork(api, "a@1004", name="b")
        assert (await api.until("b", "ended")).reason == "completed"


async def test_a_damaged_checkpoint_begins_nothing(home: Path) -> None:
    async with serving(home) as api:
        await parent(api)
        manifest = home / "runs/a/checkpoints/000004-a1/manifest.json"
        manifest.write_text(manifest.read_text().replace('"facts"', '"fakts"'))
        with pytest.raises(IntegrityError):
            await fork(api, "a@1004", name="b")
        assert [path.name for path in (home / "runs").iterdir()] == ["a"]


@pytest.mark.system
def test_fork_carries_moments_unless_fresh() -> None:
    with world() as made:
        made.run("a", "trainer.steps=2")
        made.json("fork", "a@2", "--name", "on", "--steps", "1", "--wait")
        made.json("fork", "a@2", "trainer.lr=1e-4", "--name", "anew", "--steps", "1", "--fresh", "--wait")
        before, after, anew = (
            optimizer(made.client.checkpoints(run)[-1].path) for run in ("a", "on", "anew")
        )
        assert [int(state["step"][0]) for state in (before, after, anew)] == [2, 3, 1]
        seconds = [name for name in before if name.startswith("exp_avg_sq.")]
        assert all(np.all(after[name] >= 0.998 * before[name]) for name in seconds)
        assert not all(np.all(anew[name] >= 0.998 * before[name]) for name in seconds)
        assert {made.client.adapters(run)[0].sha256 for run in ("on", "anew")} == {
            made.client.adapters("a")[-1].sha256
        }
        manifest = json.loads((Path(made.client.adapters("on")[0].path or "") / "manifest.json").read_text())
        assert manifest["facts"]["parent"] == "a@2"
        assert "a@2" in made.lorad("show", "on").stdout


def optimizer(checkpoint: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_file(Path(checkpoint) / "optimizer.safetensors")
    return found
