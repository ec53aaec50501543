"""`lorad doctor --trainer` and the check of a model: what is there, what is not, and what to do about it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorad.adapters.adapter import AdapterConfig
from lorad.backends.installed import FOR_GPUS, NEEDED, install_lines, mending_hint
from lorad.backends.recipes import recipe_of
from lorad.backends.trainer_probe import WANTED
from lorad.box.config import Backend, Config, from_plain
from lorad.children.interpreter import NoInterpreter, installed, look
from lorad.errors import SpecError
from lorad.models.facts import read_facts
from lorad.preflight.trainers import check_names
from lorad.spec.model import convert
from tests.kit.world import World, world
from tests.trainers.real.pairs import configured

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        it.home.root.mkdir(parents=True, exist_ok=True)
        yield it


def test_fsdp_needs_nothing_but_lorads_own_environment(made: World) -> None:
    made.home.config.write_text("{}")
    first, *others = made.json("doctor", "--trainer", "fsdp")
    assert first["facts"]["python"] == sys.executable and "torch" in first["facts"]["versions"]
    assert {check["name"] for check in others} >= {"torch", "torch.distributed.fsdp", "transformers", "peft"}


def test_unconfigured_trainer_shows_its_install_commands(made: World) -> None:
    made.home.config.write_text("{}")
    told = made.lorad("doctor", "--trainer", "megatron", expect=1).stdout
    assert [line for line in install_lines("megatron") if line not in told] == []


def test_python_without_the_trainer_fails_the_check(made: World) -> None:
    made.home.config.write_text(json.dumps({"backends": {"megatron": {"python": sys.executable}}}))
    (check,) = made.json("doctor", "--trainer", "megatron", expect=1)
    assert check["name"] == "interpreter" and "megatron needs megatron-bridge" in check["detail"]


def test_an_interpreter_that_is_not_there_is_named(made: World) -> None:
    made.home.config.write_text("backends: {fsdp: {python: /nowhere/bin/python}}")
    assert "/nowhere/bin/python" in made.lorad("doctor", "--trainer", "fsdp", expect=1).stdout


@pytest.mark.parametrize(
    ("program", "said"), [("/bin/true", "it printed nothing"), ("/bin/echo", "it printed '-I -c")]
)
def test_program_other_than_python_is_refused(program: str, said: str) -> None:
    with pytest.raises(NoInterpreter, match="it is no Python: asked what is installed") as refused:
        installed(Path(program), ["torch"])
    assert said in str(refused.value)
    assert look(Path(program), {}, WANTED["fsdp"]) == "it gave no answer"


def test_broken_package_is_not_reported_as_missing(made: World, tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/__init__.py").write_text("raise ImportError('cut in half')")
    made.home.config.write_text(
        json.dumps({"backends": {"fsdp": {"python": sys.executable, "env": {"PYTHONPATH": str(tmp_path)}}}})
    )
    checks = {check["name"]: check for check in made.json("doctor", "--trainer", "fsdp", expect=1)}
    assert checks["peft"]["detail"] == "ImportError: cut in half"
    assert checks["peft"]["hint"] == mending_hint("fsdp") and "not installed yet" not in mending_hint("fsdp")


def test_install_commands_cover_what_trainers_need() -> None:
    assert "peft" in NEEDED["fsdp"] and "peft" in WANTED["fsdp"].modules
    assert WANTED["megatron"].for_gpus == ("transformer_engine.pytorch",)
    for backend in NEEDED:
        lines = " ".join(install_lines(backend, gpu=True))
        lines += " ".join(recipe_of(backend, "cu").pins) if backend == "megatron" else ""
        assert [name for name in (*NEEDED[backend], *FOR_GPUS.get(backend, ())) if name not in lines] == []


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        pytest.param(
            "smollm3", {}, "architecture 'SmolLM3ForCausalLM' is not yet supported", marks=pytest.mark.long
        ),
        (
            "llama",
            {"attention_bias": True},
            "would leave out 8 tensors of the model: model.layers.0.self_attn",
        ),
        pytest.param(
            "olmoe",
            {"num_experts": 4},
            "finds no tensor in .* for decoder.layers.0.self_attention",
            marks=pytest.mark.long,
        ),
        ("mistral", {}, ""),
    ],
)
def test_the_check_refuses_as_megatron_would(
    kind: str, more: dict[str, Any], says: str, megatron_python: str, tmp_path: Path
) -> None:
    made = AutoConfig.for_model(kind, **SMALL, **more)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(tmp_path)
    spec = convert({"trainer": {"backend": "megatron"}, "rollout": {"backend": "vllm"}})
    box = Config(backends=from_plain(configured("megatron"), dict[str, Backend]))
    facts, adapter = read_facts(tmp_path), AdapterConfig(8, 16.0, (Q,))
    if not says:
        assert check_names(spec, facts, adapter, tmp_path, box, "cpu") == []
        return
    with pytest.raises(SpecError, match=says) as refused:
        check_names(spec, facts, adapter, tmp_path, box, "cpu")
    assert refused.value.key == "model.path" and "trainer.backend: fsdp" in refused.value.hint
