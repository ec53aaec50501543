"""The recipes of `examples/`: what each says holds, and each runs, with a small base in place of its own."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from lorad.box.config import Config
from lorad.cli.app import app
from lorad.preflight.backends import check_backends
from lorad.rl.reward import RewardInput, gsm8k
from lorad.spec.model import Spec
from lorad.spec.text import load_spec, mapping
from lorad.tui.spec_lines import DEFAULTS, flat
from tests.kit.world import REPOSITORY, World, world

EXAMPLES = REPOSITORY / "examples"
SMALL = (
    *(
        "model.path=builtin:tiny",
        "data.train=sort",
        "data.eval=null",
        "reward=exact_match",
        "data.max_prompt_tokens=64",
    ),
    *("data.prompts_per_step=4", "rollout.max_new_tokens=12", "trainer.steps=2", "eval.problems=8"),
    *("trainer.tp=1", "trainer.dp=1", "trainer.ep=1", "rollout.backend=builtin", "rollout.servers=1", "rollout.tp=1"),
)


def spec_of(recipe: str) -> Spec:
    return load_spec((EXAMPLES / f"{recipe}.yaml").read_text(), source=recipe)


NAMES = [path.stem for path in EXAMPLES.glob("*.yaml") if path.stem != "demo"]
RECIPES = sorted(NAMES)


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as home:
        yield home


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """`examples/gsm8k.py`, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("gsm8k", EXAMPLES / "gsm8k.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_backends_and_sizes_that_fit_together(recipe: str) -> None:
    spec = spec_of(recipe)
    check_backends(spec, Config())
    assert spec.gpus == spec.trainer.ranks == spec.rollout.servers * spec.rollout.tp, "all GPUs train, then all sample"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_the_builtin_base(made: World, recipe: str) -> None:
    flags = ("--trainer", "builtin", "--name", recipe, "--wait")
    made.lorad("run", EXAMPLES / f"{recipe}.yaml", *SMALL, *flags)
    run = made.client.show(recipe)
    assert (run.reason, run.step) == ("completed", 2)
    assert {version.rank for version in made.client.adapters(recipe)} == {spec_of(recipe).lora.rank}


def test_gsm8k_rows_ask_for_the_mark_that_the_reward_looks_for(script: ModuleType) -> None:
    problem = {"question": "How much are 2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
    (row,) = script.rows([problem])
    assert row["prompt"].startswith(problem["question"]) and "####" in row["prompt"]
    assert gsm8k(RewardInput(row["prompt"], "So it is\n#### 1004", row["answer"], "stop")) == 1.0


def test_every_recipe_reads_what_the_script_writes(script: ModuleType) -> None:
    wanted = {f"{script.DEFAULT}/train.jsonl", f"{script.DEFAULT}/test.jsonl"}
    assert {path for recipe in RECIPES for path in (spec_of(recipe).data.train, spec_of(recipe).data.eval)} == wanted
    assert Path(script.DEFAULT).name == "gsm8k"


# -- the README --------------------------------------------------------------------------------------------------------
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TYPED = [line[2:].partition("  #")[0] for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
COMMANDS = sorted(
    {found[1] for line in TYPED if (found := re.search(r"(?<![/\w])lorad ([a-z].*?)(?: *; done)?$", line.strip()))}
)


def test_the_spec_in_the_readme_has_every_key() -> None:
    (told,) = (text for kind, text in BLOCKS if kind == "yaml" and text.startswith("name: sorter"))
    given, whole = flat(mapping(told)), ("lora", "algorithm", "checkpoint", "pool", "eval", "attest")
    assert load_spec(told, source="README").name == "sorter"
    assert [key for key in DEFAULTS if key.partition(".")[0] in whole and key not in given and key not in README] == []


def test_what_the_readme_calls_all_may_be_0() -> None:
    kept = load_spec("checkpoint: {keep: 0, keep_versions: 0, keep_samples: 0}").checkpoint
    assert (kept.keep, kept.keep_versions, kept.keep_samples) == (0, 0, 0)


@pytest.mark.parametrize("typed", COMMANDS)
def test_commands_of_the_readme_are_commands(typed: str) -> None:
    words = [word for word in shlex.split(typed) if word != "<"]
    command: Any = get_command(app)
    with typer.Context(command) as context:
        while isinstance(command, TyperGroup) and words:
            command = command.get_command(context, words.pop(0))
            assert command is not None
        flags = [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
        known = {
            flag for parameter in command.get_params(context) for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        assert [flag for flag in flags if flag not in known] == []


def test_make_targets_of_the_readme_are_targets() -> None:
    told = set(re.findall(r"`make ([a-z0-9-]+)", README))
    made = re.findall(r"^([\w\- ]+):(?!=)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert told - set(" ".join(made).split()) == set()
