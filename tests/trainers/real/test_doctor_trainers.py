"""`lorad doctor --trainer`: what is there, and what is not with what to do about it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.backends.trainer_install import FOR_GPUS, NEEDED, install_lines, mending_hint
from lorad.backends.trainer_probe import WANTED
from lorad.children.interpreter import NoInterpreter, installed, look
from tests.kit.world import World, world


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
        assert [name for name in (*NEEDED[backend], *FOR_GPUS.get(backend, ())) if name not in lines] == []
