"""`lorad serve`: adapters from elsewhere are checked, attested and served under a name, on a base that stays
warm.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.peft import outline, write_peft
from lorad.adapters.validate import expected_shapes
from lorad.cli.app import app
from lorad.daemon.runs import import_adapter
from lorad.errors import AdapterRefused, AttestationFailed, Conflict, NotFound, SpecError
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.protocol.heartbeat import read_beat
from lorad.records.versions import ServedModel
from lorad.spec.model import Spec, convert
from lorad.store import runs
from tests.adapters.test_peft_files import tiny_with_head
from tests.kit.daemon_world import Api, behave, finished, serving, submit, until, until_state
from tests.kit.world import world

MODULES = ("model.layers.0.self_attn.q_proj",)


def adapter_in(
    directory: Path,
    seed: int = 0,
    modules: tuple[str, ...] = MODULES,
    rank: int = 2,
    *,
    dora: bool = False,
) -> Path:
    """A PEFT directory that fits builtin:tiny."""
    config = AdapterConfig(rank, 4.0, modules, dora=dora)
    shapes = expected_shapes(config, read_facts(resolve("builtin:tiny")).linears)
    numbers = np.random.default_rng(seed)
    tensors = {
        name: numbers.normal(size=shape, scale=0.1).astype(np.float32) for name, shape in shapes.items()
    }
    directory.mkdir()
    write_peft(Adapter(config, tensors), directory, "builtin:tiny")
    return directory


async def serve(api: Api, *overrides: str, model: str = "builtin:tiny", **adapters: Path) -> ServedModel:
    named = [{"name": name, "directory": str(directory)} for name, directory in adapters.items()]
    served: ServedModel = await api("serve", model, named, cwd="/", overrides=[*overrides])
    return served


def nothing_is_left(api: Api) -> bool:
    home = api.ctx.home.root
    return not runs.list_runs(api.ctx.store, all=True) and not list((home / "runs").iterdir())


async def test_imported_directory_is_served_by_alias(home: Path, tmp_path: Path) -> None:
    async with serving(home) as api:
        made = await serve(api, bot=adapter_in(tmp_path / "bot"))
        (alias,) = made.aliases
        assert (alias.alias, alias.run, alias.version, alias.attested) == ("bot", "bot", 0, "passed")
        assert made.gateway == str(api.ctx.home.gateway_socket)
        shown = await api("show", "bot")
        assert (shown.state, shown.reason, shown.serving) == ("ended", "imported", True)
        assert (shown.origin, shown.spec["lora"]["target_modules"]) == (str(tmp_path / "bot"), [MODULES[0]])
        (version,) = await api("adapters", "bot")
        assert (version.loaded, version.rank, version.alpha) == (True, 2, 4.0)
        assert api.ctx.pools[made.pool].serves == {"bot"}
        table = json.loads((home / "gateway/table.json").read_text())
        assert table["aliases"] == {"bot": "bot@0"} and table["versions"]["bot@0"]["socket"]
        assert (await api("verify", "bot")).problems == 0


async def test_imported_dora_stays_dora(home: Path, tmp_path: Path) -> None:
    source = adapter_in(tmp_path / "bot", dora=True)
    async with serving(home) as api:
        await serve(api, bot=source)
        assert (await api("show", "bot")).spec["lora"]["dora"] is True
    with pytest.raises(AdapterRefused, match="vllm has no place for the magnitudes of DoRA"):
        spec = convert({"rollout": {"backend": "vllm"}})
        import_adapter.read(source, outline(source), spec, resolve("builtin:tiny"))


async def test_changed_bytes_become_the_next_version(home: Path, tmp_path: Path) -> None:
    first, second = adapter_in(tmp_path / "a", 1), adapter_in(tmp_path / "b", 2, rank=4)
    async with serving(home) as api:
        for source, number in ((first, 0), (first, 0), (second, 1), (first, 0)):
            (alias,) = (await serve(api, bot=source)).aliases
            assert alias.version == number
        assert [version.rank for version in await api("adapters", "bot")] == [2, 4]
        assert [move.version for move in await api("alias_moves", "bot")] == [0, 1, 0]


async def test_changed_alpha_makes_another_version(home: Path, tmp_path: Path) -> None:
    source = adapter_in(tmp_path / "a")
    async with serving(home) as api:
        await serve(api, bot=source)
        settings = source / "adapter_config.json"
        settings.write_text(settings.read_text().replace('"lora_alpha": 4', '"lora_alpha": 32'))
        for _ in range(2):
            (alias,) = (await serve(api, bot=source)).aliases
            assert alias.version == 1
        assert [version.alpha for version in await api("adapters", "bot")] == [4.0, 32.0]


async def test_one_failed_attestation_leaves_nothing_behind(home: Path, tmp_path: Path) -> None:
    behave(home, pool={"refuses": ["b@0"]})
    async with serving(home) as api:
        with pytest.raises(AttestationFailed, match=f"adapter b of {tmp_path}"):
            await serve(api, a=adapter_in(tmp_path / "a"), b=adapter_in(tmp_path / "b"))
        assert nothing_is_left(api) and await api("aliases") == []
        behave(home)
        (alias,) = (await serve(api, b=tmp_path / "b")).aliases
        assert alias.attested == "passed"


async def test_refused_version_leaves_the_previous_serving(home: Path, tmp_path: Path) -> None:
    async with serving(home) as api:
        await serve(api, bot=adapter_in(tmp_path / "a", 1))
        behave(home, pool={"refuses": ["bot@1"]})
        with pytest.raises(AttestationFailed):
            await serve(api, bot=adapter_in(tmp_path / "b", 2))
        assert [version.version for version in await api("adapters", "bot")] == [0]
        assert [alias.version for alias in await api("aliases")] == [0]
        assert [path.name for path in (home / "runs").iterdir()] == ["bot"]


def pickled(directory: Path) -> Path:
    adapter_in(directory)
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    return directory


def not_finite(directory: Path) -> Path:
    config = AdapterConfig(2, 4.0, MODULES)
    shapes = expected_shapes(config, read_facts(resolve("builtin:tiny")).linears)
    directory.mkdir()
    tensors = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    write_peft(Adapter(config, tensors), directory, "builtin:tiny")
    return directory


def other_base(directory: Path) -> Path:
    name, half = "model.layers.99.self_attn.q_proj", np.ones((1, 4), np.float32)
    tensors = {f"{name}.lora_A.weight": half, f"{name}.lora_B.weight": half.T.copy()}
    directory.mkdir()
    write_peft(Adapter(AdapterConfig(1, 2.0, (name,)), tensors), directory, "builtin:tiny")
    return directory


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pickled, "pickled weights are never read"),
        (not_finite, "NaN"),
        (other_base, "the base has no linear"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused(
    home: Path, tmp_path: Path, make: Any, says: str
) -> None:
    async with serving(home) as api:
        with pytest.raises(AdapterRefused, match=says) as refused:
            await serve(api, good=adapter_in(tmp_path / "good"), bad=make(tmp_path / "bad"))
        assert "adapter bad" in refused.value.message and refused.value.hint
        assert nothing_is_left(api) and not api.ctx.pools


def test_copied_base_head_fits_that_base_alone(tmp_path: Path) -> None:
    base = untied(tmp_path / "base")

    def read(name: str, base_served: Path = base, **how: Any) -> Adapter:
        source = tiny_with_head(tmp_path / name, "q_proj", "lm_head", base=base, **how)
        return import_adapter.read(source, outline(source), Spec(), base_served)[0]

    assert "lm_head" in read("own").config.modules
    with pytest.raises(AdapterRefused, match=r"lm_head\.base_layer\.weight is not that of the base"):
        read("other", train_head=True)
    with pytest.raises(AdapterRefused, match="lm_head of the base is its embedding and no linear"):
        read("tied", resolve("builtin:tiny"))


def untied(directory: Path) -> Path:
    shutil.copytree(resolve("builtin:tiny"), directory)
    model = AutoModelForCausalLM.from_pretrained(directory, tie_word_embeddings=False)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return directory


def shortened(directory: Path) -> Path:
    shutil.copytree(resolve("builtin:tiny"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    return directory


async def test_misfitting_adapter_is_refused_from_its_header(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.adapters.peft.read_tensors", lambda *_: pytest.fail("its weights were read"))
    async with serving(home) as api:
        with pytest.raises(AdapterRefused, match="the base has no linear"):
            await serve(api, bad=other_base(tmp_path / "bad"))


async def test_a_name_that_means_something_else_is_refused(home: Path, tmp_path: Path) -> None:
    source = adapter_in(tmp_path / "a")
    async with serving(home) as api:
        await api.run("taken")
        await api.until("taken", "ended")
        await api("swap", "alias", "taken")
        with pytest.raises(Conflict, match="a run that trains"):
            await serve(api, taken=source)
        with pytest.raises(Conflict, match="alias alias serves taken@"):
            await serve(api, alias=source)
        with pytest.raises(SpecError, match="no name"):
            await serve(api, base=source)
        with pytest.raises(SpecError, match="for runs that train"):
            await serve(api, "lora.rank=4", bot=source)


async def test_serving_pool_is_kept_up_and_revived(home: Path, tmp_path: Path) -> None:
    async with serving(home, idle_timeout=0.0) as api:
        made = await serve(api, bot=adapter_in(tmp_path / "a"))
        pool = api.ctx.pools[made.pool]
        with pytest.raises(Conflict, match="kept up to serve bot"):
            await api("stop_pool", pool.id)
        first = await up(pool)
        api.ctx.processes.kill_group(pool.attempt())
        await until(lambda: pool.process.pid not in (None, first) and pool.state == "ready")
        await until(lambda: pool.status and pool.status.kept == ["bot@0"])
        assert (await api("stop_serving", "builtin:tiny")).runs == ["bot"]
        await until(lambda: pool.state == "ended")
        with pytest.raises(NotFound, match="nothing named bot"):
            await api("stop_serving", "bot")


async def up(pool: Any) -> int:
    pid: int = await until(lambda: pool.state == "ready" and pool.process.pid)
    return pid


async def test_serving_goes_on_under_the_next_daemon(home: Path, tmp_path: Path) -> None:
    async with serving(home, idle_timeout=0.0) as api:
        pid = await up(api.ctx.pools[(await serve(api, bot=adapter_in(tmp_path / "a"))).pool])
    async with serving(home, idle_timeout=0.0) as api:
        (pool,) = api.ctx.pools.values()
        await until(lambda: pool.serves == {"bot"})
        assert await up(pool) == pid


async def test_run_joins_serving_base_while_others_wait(home: Path, tmp_path: Path) -> None:
    async with serving(home, idle_timeout=0.0) as api:
        made = await serve(api, bot=adapter_in(tmp_path / "a"))
        await api.run("joins", "model.path=builtin:tiny")
        assert (await api.until("joins", "ended")).pool == made.pool
        submit(api.ctx, "other", model="/models/other")
        waiting = await until(lambda: runs.get(api.ctx.store, "other").waiting)
        assert "serves bot" in waiting and "lorad serve --stop" in waiting
        await api("stop_serving", "bot")
        await until_state(api.ctx, "other", "ended")


async def test_blocked_serving_says_what_it_awaits(home: Path, tmp_path: Path) -> None:
    async with serving(home, idle_timeout=0.0) as api:
        made = await serve(api, bot=adapter_in(tmp_path / "a"))
        await api("stop_serving", "bot")
        await until(lambda: api.ctx.pools[made.pool].state == "ended")
        behave(home, driver={"seconds": 0.3})
        submit(api.ctx, "other", model="/models/other")
        await until_state(api.ctx, "other", "running")
        runs.set_fields(api.ctx.store, "bot", serving=1)
        api.ctx.loop.poke()
        await until(lambda: "busy with run other" in runs.get(api.ctx.store, "bot").waiting)
        assert "busy with run other" in (await api("show", "bot")).waiting
        behave(home)
        await api("kill", "other")
        await until(lambda: api.ctx.pools[made.pool].state == "ready")
        assert (await api("show", "bot")).waiting == ""


async def test_alias_of_trained_run_can_stay_warm(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match="nothing to serve"):
            await serve(api)
        await api.run("a")
        await api.until("a", "ended")
        await api("swap", "bot", "a@1004")
        made = await serve(api)
        assert [alias.alias for alias in made.aliases] == ["bot"]
        assert api.ctx.pools[made.pool].serves == {"a"}
        assert (await api("stop_serving", "bot")).runs == ["a"]


async def test_imported_adapter_forks_but_never_resumes(home: Path, tmp_path: Path) -> None:
    async with serving(home) as api:
        await serve(api, bot=adapter_in(tmp_path / "a"))
        with pytest.raises(Conflict, match="never trained here"):
            await api("resume", "bot")
        await api("fork", "bot", overrides=["eval.every=0"], name="on", steps=2, fresh=True)
        assert (await api.until("on", "ended")).reason == "completed"


async def test_served_adapter_is_told_to_be_listed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = adapter_in(tmp_path / "bot")
    async with serving(home):
        for words in (["serve", "builtin:tiny", "-a", f"bot={source}"], ["list", "-c", "name,state,origin"]):
            await asyncio.to_thread(app, words, standalone_mode=False)
        out, err = capsys.readouterr()
    assert "`lorad list` shows each adapter as a run of its name that was imported" in err
    assert f"bot\tended: imported\t{source}" in out


@pytest.mark.system
def test_real_pool_serves_from_the_command_line() -> None:
    with world() as made:
        source = adapter_in(
            made.root / "bot", modules=("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
        )
        short = shortened(made.root / "short")  # shorter than the default of data.max_prompt_tokens
        told = made.lorad("serve", short, "--adapter", f"bot={source}")
        lengths = made.json("show", "bot")["spec"]
        assert (lengths["data"]["max_prompt_tokens"], lengths["rollout"]["max_new_tokens"]) == (72, 24)
        assert "bot@0" in told.stdout
        answer = answer_of(told.stderr)
        assert (answer["system_fingerprint"], answer["object"]) == ("lorad-bot@0", "chat.completion")
        moved = made.lorad("swap", "other", "bot@0").stderr
        assert answer_of(moved)["model"] == "other" and f"Socket: {made.home.gateway_socket}" in moved
        assert "Traceback" not in pasted(moved)
        assert "401" in pasted(moved.replace("/gateway/key", "/gateway/port"))
        assert made.home.gateway_key.read_text() not in moved
        status = made.lorad("daemon", "status").stdout
        assert f"With the key in {made.home.gateway_key} it speaks it on http://127.0.0.1:" in status
        assert read_beat(made.home.gateway / "attempts" / "0001" / "heartbeat")  # whoever stops it is noticed
        logs = made.lorad("logs", "--of", "gateway").stdout
        assert (
            "gateway answers on http://127.0.0.1:" in logs and made.home.gateway_key.read_text() not in logs
        )
        assert made.json("generate", "bot", "3 1 2")["version"] == "bot@0"
        assert "imported" in made.lorad("show", "bot").stdout
        assert made.json("verify", "bot")["problems"] == 0
        assert made.json("serve", "--stop", "bot") == {"model": "bot", "runs": ["bot"]}
        assert "NAME=DIR" in made.lorad("serve", "builtin:tiny", "--adapter", "bot", expect=2).stderr


def answer_of(said: str) -> Any:
    """Run the line that a command says to try; returns its JSON."""
    (line,) = [line for line in said.splitlines() if line.startswith("Try it: ")]
    done = subprocess.run(
        line.removeprefix("Try it: "), shell=True, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def pasted(said: str) -> str:
    """Run the lines of Python that a command prints, as they are; returns what these print, errors too."""
    code = said.partition("In Python:\n")[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.rstrip("\n") + done.stderr


async def test_version_of_another_pool_kind_waits(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx, "a")
        finished(api.ctx, "b", pool={"mode": "resident"})
        await api("swap", "one", "a@1006")
        await api("swap", "two", "b@1006")
        model = runs.get(api.ctx.store, "a")
        await serve(api, model=json.loads(model.spec)["model"]["path"])
        await until(lambda: "serves a" in runs.get(api.ctx.store, "b").waiting)
        assert [pool.serves for pool in api.ctx.pools.values() if pool.serves] == [{"a"}]
