"""The demo on a mixture of experts: it learns, survives a kill bit for bit, and becomes one model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.adapters.peft import read_peft
from tests.kit.world import REPOSITORY, World, world

DEMO = REPOSITORY / "examples" / "demo-moe.yaml"
EVERY = ("checkpoint.every=4", "eval.every=0", "trainer.steps=16")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        yield it


def test_demo_learns_and_every_version_is_attested(made: World) -> None:
    run = made.json("run", DEMO, "--name", "demo", "--wait")
    assert run["eval_first"] < 0.4 and run["eval_last"] >= 0.8
    assert {version["attested"] for version in made.json("adapters", "demo")} == {"passed"}
    assert run["spec"]["lora"]["experts"] == {"rank": 8, "layout": "per_expert"}
    assert "rank 16 (8 on experts) on 48 linears" in made.lorad("check", DEMO).stdout


def test_killed_run_resumes_bit_for_bit(made: World) -> None:
    made.json("run", DEMO, "--name", "whole", "--wait", *EVERY)
    made.lorad("run", DEMO, "--name", "killed", "-d", *EVERY)
    made.strike("killed", "pool", 5)
    made.lorad("wait", "killed", expect=1)
    made.lorad("resume", "killed", "--wait")
    digests = [made.json("adapters", name)[-1]["sha256"] for name in ("whole", "killed")]
    assert digests[0] == digests[1]


def test_merged_model_is_the_adapted_one(made: World, tmp_path: Path) -> None:
    made.lorad("export", "demo", tmp_path / "model", "--merge")
    again = made.json(
        "run", DEMO, "--name", "again", "--wait", "trainer.steps=1", f"model.path={tmp_path / 'model'}"
    )
    assert again["eval_first"] == made.json("show", "demo")["eval_last"]


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
