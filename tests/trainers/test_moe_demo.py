"""The demo on a mixture of experts: it learns, survives a kill bit for bit, and becomes one model."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from lorad.adapters.peft import read_peft
from lorad.models.directory import linear_shapes, read_config, resolve
from tests.kit.world import REPOSITORY, World, world
from tests.models.test_families import make_model

pytestmark = pytest.mark.system

DEMO = REPOSITORY / "examples" / "demo-moe.yaml"
FEWER = ("trainer.steps=14", "eval={every: 14, problems: 128}")  # 0.98 from the eighth on
FEW = ("checkpoint.every=2", "eval.every=0", "trainer.steps=8", "data.prompts_per_step=8")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        yield it


def test_demo_learns_and_every_version_is_attested(made: World) -> None:
    run = made.json("run", DEMO, "--name", "demo", "--wait", *FEWER)
    assert run["eval_first"] < 0.4 and run["eval_last"] >= 0.8
    assert {version["attested"] for version in made.json("adapters", "demo")} == {"passed"}
    assert run["spec"]["lora"]["experts"] == {"rank": 8}
    assert "rank 16 (8 on experts), alpha 32, on 48 linears" in made.lorad("check", DEMO).stdout


def test_killed_run_resumes_bit_for_bit(made: World) -> None:
    made.json("run", DEMO, "--name", "whole", "--wait", *FEW)
    made.lorad("run", DEMO, "--name", "killed", "-d", *FEW)
    made.strike("killed", "pool", 3)
    made.lorad("wait", "killed", expect=1)
    made.lorad("resume", "killed", "--wait")
    digests = [made.json("adapters", name)[-1]["sha256"] for name in ("whole", "killed")]
    assert digests[0] == digests[1]


def test_merged_model_is_the_adapted_one(made: World, tmp_path: Path) -> None:
    made.lorad("export", "demo", tmp_path / "model", "--merge")
    alone = (*FEWER, "trainer.steps=1", f"model.path={tmp_path / 'model'}")
    again = made.json("run", DEMO, "--name", "again", "--wait", *alone)
    assert again["eval_first"] == made.json("show", "demo")["eval_last"]


# an expert of mixtral has tensors of its own, as one of glm4_moe
@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=pytest.mark.long), "glm4_moe", "gpt_oss"])
def test_other_mixtures_run_and_are_merged(made: World, tmp_path: Path, family: str) -> None:
    base, tiny = tmp_path / "base", resolve("builtin:tiny-moe")
    make_model(base, family, vocab_size=read_config(tiny).vocab_size, max_position_embeddings=128)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, base / name)
    reward = "reward={name: regex, pattern: '[a-m]'}"  # which half of what is random has
    short = (reward, "trainer.steps=3", "data.prompts_per_step=4", "eval.every=0", "checkpoint.every=2")
    made.json("run", DEMO, "--name", family, "--wait", f"model.path={base}", *short)
    versions = made.json("adapters", family)
    assert {version["attested"] for version in versions} == {"passed"} and len(versions) > 2
    adapter = read_peft(Path(versions[-1]["path"]))
    assert adapter.config.modules == tuple(sorted({*linear_shapes(read_config(base))} - {"lm_head"}))
    if family == "gpt_oss":  # all experts of a layer in one tensor
        assert "in one tensor" in made.lorad("export", family, tmp_path / "m", "--merge", expect=2).stderr
        return
    made.lorad("export", family, tmp_path / "model", "--merge")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == (
        load_file(base / "model.safetensors").keys()
    )


def test_exports_say_who_reads_experts(made: World, tmp_path: Path) -> None:
    said = made.lorad("export", "demo", tmp_path / "plain").stderr
    assert "read exactly by PEFT, vllm. Not by sglang: it has one rank for all modules." in said
    assert "read exactly by PEFT" in (tmp_path / "plain" / "README.md").read_text()
    made.lorad("export", "demo", tmp_path / "own", "--format", "peft5")
    plain, own = (read_peft(tmp_path / name) for name in ("plain", "own"))
    assert own.digest() == plain.digest() and own.config == plain.config
    assert (
        "--format"
        in made.lorad("export", "demo", tmp_path / "x", "--format", "peft5", "--merge", expect=2).stderr
    )
    card = (tmp_path / "own" / "README.md").read_text()
    assert "vllm serve" not in card and (tmp_path / "own" / "tokenizer.json").exists()
    assert (
        "rank 16 (8 on experts)" in made.lorad("check", DEMO, f"lora.adapter_path={tmp_path / 'own'}").stdout
    )
    made.lorad("export", "demo", tmp_path / "own", "--format", "peft5", expect=1)
