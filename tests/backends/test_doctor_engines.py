"""`lorad doctor --engine`, where no server is installed, reports what is wrong and what to do about it."""

import json
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from lorad.backends.engine_trial import compare_scores
from lorad.backends.recipes import install_lines
from tests.kit.world import World, world


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        it.home.root.mkdir(parents=True, exist_ok=True)
        yield it


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_unconfigured_server_shows_its_install_commands(made: World, kind: str) -> None:
    made.home.config.write_text("{}")
    told = made.lorad("doctor", "--engine", kind, expect=1).stdout
    assert [line for line in install_lines(kind) if line not in told] == []


def test_an_interpreter_that_is_not_there_is_named(made: World) -> None:
    made.home.config.write_text("backends: {vllm: {python: /nowhere/bin/python}}")
    assert "/nowhere/bin/python" in made.lorad("doctor", "--engine", "vllm", expect=1).stdout


def test_python_without_the_server_fails_the_interpreter_check(made: World) -> None:
    made.home.config.write_text(json.dumps({"backends": {"vllm": {"python": sys.executable}}}))
    (check,) = made.json("doctor", "--engine", "vllm", expect=1)
    assert check["name"] == "interpreter" and "not installed" in check["detail"] and "pip" in check["hint"]


def test_unreadable_config_fails_the_check(made: World) -> None:
    made.home.config.write_text("backends: {sglang: {pyton: /x}}")
    assert "pyton" in made.lorad("doctor", "--engine", "sglang", expect=1).stdout


def test_an_unknown_engine_is_bad_usage(made: World) -> None:
    assert "sglang" in made.lorad("doctor", "--engine", "sgland", expect=2).stderr


@pytest.mark.parametrize("wrong", [0.01, np.nan])
def test_wrong_logprobs_of_a_server_are_found(wrong: float) -> None:
    ours = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    assert compare_scores(ours, ours, "float32").ok
    assert not compare_scores([ours[0], ours[1] + np.float32(wrong)], ours, "float32").ok
