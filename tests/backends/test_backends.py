"""Trainers and engines are found by name, or by the place of a class."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from lorad.adapters.adapter import AdapterConfig
from lorad.backends.registry import ENGINES, engine_class, trainer_class
from lorad.backends.setup import backend_setup, server_setup
from lorad.box.config import Backend, Config
from lorad.errors import SpecError
from lorad.limits.check import refuse
from lorad.preflight.backends import check_backends
from lorad.protocol.preflight import BaseFacts
from lorad.spec.model import convert
from lorad.trainers.builtin.trainer import BuiltinTrainer


def test_the_registry_imports_no_backend() -> None:
    code = "import sys, lorad.backends.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_backends_are_found_by_name_or_by_place() -> None:
    assert trainer_class("builtin") is BuiltinTrainer
    assert trainer_class("mine", "lorad.trainers.builtin.trainer:BuiltinTrainer") is BuiltinTrainer
    assert engine_class("mine", ENGINES["builtin"]) is engine_class("builtin")


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("bultin", None, "no trainer 'bultin'"),
        ("mine", "lorad.no_such_module:Trainer", "can not be imported"),
        ("mine", "lorad.errors:NoSuchClass", "can not be imported"),
        ("mine", "lorad.errors:SpecError", "is no trainer"),
    ],
)
def test_a_backend_that_is_none_is_refused(name: str, override: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trainer_class(name, override)
    with pytest.raises(SpecError, match=message.replace("trainer", "engine")):
        engine_class(name, override)


@pytest.mark.parametrize(
    ("part", "name", "fitting"),
    [
        ("trainer", "sglang", "builtin, fsdp, megatron, mine;"),
        ("trainer", "theirs", "builtin, fsdp, megatron, mine;"),
        ("rollout", "megatron", "builtin, sglang, theirs, transformers, vllm;"),
        ("rollout", "mine", "builtin, sglang, theirs, transformers, vllm;"),
    ],
)
def test_backend_of_the_other_side_is_refused(part: str, name: str, fitting: str) -> None:
    mine, theirs = Backend(trainer="a:Trainer"), Backend(engine="b:Engine")
    config = Config(backends={"sglang": Backend(), "megatron": Backend(), "mine": mine, "theirs": theirs})
    with pytest.raises(SpecError, match=rf"{part}\.backend: no backend '{name}'") as refused:
        check_backends(convert({part: {"backend": name}}), config)
    assert fitting in refused.value.hint
    check_backends(convert({"trainer": {"backend": "mine"}, "rollout": {"backend": "theirs"}}), config)


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_servers_are_asked_for_what_they_take(backend: str, tmp_path: Path) -> None:
    """SGLang ends at once when one of its targets is a linear that it does not know."""
    spec, python = convert({"rollout": {"backend": backend}}), Backend(python=Path("/python"))
    facts = BaseFacts(modules=["l.0.q_proj"], linears=["in_proj_qkv", "q_proj", "v_proj"])
    found = server_setup(spec, python, facts, tmp_path).targets
    assert found == (*["in_proj_qkv"] * (backend == "vllm"), "q_proj", "v_proj")
    own = replace(facts, modules=["l.0.in_proj_qkv", "l.0.q_proj"])
    if backend == "vllm":
        assert "in_proj_qkv" in server_setup(spec, python, own, tmp_path).targets
        return
    of_type = replace(own, model_type="qwen3_5")
    assert "in_proj_qkv" in server_setup(spec, python, of_type, tmp_path).targets
    with pytest.raises(SpecError, match="sglang takes no adapters on in_proj_qkv") as refused:
        refuse(backend_setup(spec, adapter=AdapterConfig(8, 16.0, tuple(own.modules))))
    assert refused.value.key == "lora.target_modules"
