"""The JSON Schema of a spec agrees with lorad: it takes what lorad takes, and refuses what a value alone
shows to be wrong. What several values together show is left to `lorad check`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from lorad.errors import SpecError
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.errors import leaves
from lorad.spec.keys import sections_of
from lorad.spec.model import Spec, convert
from lorad.spec.schema import schema
from lorad.spec.text import mapping
from tests.spec import test_algorithms, test_text

SCHEMA = schema()
VALIDATOR = Draft202012Validator(SCHEMA)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
PROBES: list[Any] = [
    None,
    -1,
    0,
    3,
    0.5,
    1.5,
    10**12,
    True,
    "",
    "word",
    "a b",
    [],
    [1.0, 2.0],
    ["a"],
    {},
    {"x": 1},
]
# Checks across keys, or inside a text: each is a function that lorad calls behind the types.
SEMANTIC = {
    "test_parts_that_do_not_fit_are_refused",
    "test_keys_that_nothing_reads_are_refused",
    "test_preferences_refuse_what_spoils_them",
}
CHECKED_INSIDE = ("reward", "data", "env.memory", "env.name", "algorithm.user_code.memory", "eval.sets")


def broken() -> Iterator[tuple[str, str]]:
    """Every spec that the tests beside this one know to be refused, and the test that does."""
    for module in (test_text, test_algorithms):
        for name, test in vars(module).items():
            for mark in getattr(test, "pytestmark", []):
                if mark.name == "parametrize" and mark.args[0] in (("text", "begins"), ("text", "key")):
                    yield from ((name, case[0]) for case in mark.args[1])
                if mark.name == "parametrize" and mark.args[0] == ("algorithm", "key"):
                    yield from ((name, f"algorithm: {case[0]}") for case in mark.args[1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert [error.message for error in VALIDATOR.iter_errors(mapping(path.read_text()))] == []


@pytest.mark.parametrize(("test", "text"), broken())
def test_broken_specs_are_refused_unless_semantic(test: str, text: str) -> None:
    try:
        data = mapping(text)
    except SpecError:  # no YAML, or not of keys: an editor says that by itself
        return
    assert VALIDATOR.is_valid(data) == (test in SEMANTIC)
    with pytest.raises(SpecError):
        refuse_contradictions(convert(data))


def test_there_are_many_broken_specs() -> None:
    found = list(broken())
    assert len(found) >= 45 and {test for test, _ in found} > SEMANTIC


@pytest.mark.parametrize("key", ["reward", *leaves(Spec)])
def test_schema_and_lorad_agree_on_every_key(key: str) -> None:
    for value in PROBES:
        data: Any = value
        for part in reversed(key.split(".")):
            data = {part: data}
        taken = True
        try:
            convert(data)
        except SpecError:
            taken = False
        if taken or not key.startswith(CHECKED_INSIDE):
            assert VALIDATOR.is_valid(data) == taken, (data, taken)


def test_unknown_keys_are_refused_in_every_section() -> None:
    for section in sections_of(Spec):
        data: Any = {"no such key": 1}
        for part in reversed(section.name.split(".") if section.name else []):
            data = {part: data}
        assert not VALIDATOR.is_valid(data), section.name


def test_every_key_says_what_it_means() -> None:
    assert all(key.meaning for section in sections_of(Spec) for key in section.keys)
    lr = SCHEMA["$defs"]["Trainer"]["properties"]["lr"]
    assert lr["description"].startswith("learning rate") and lr["default"] is None
    assert SCHEMA["$defs"]["Trainer"]["properties"]["schedule"]["enum"] == ["constant", "cosine", "linear"]


def test_units_are_of_keys_that_are_there() -> None:
    units = {key.name: key.unit for section in sections_of(Spec) for key in section.keys if key.unit}
    assert units["trainer.steps"] == "steps" and units["env.timeout"] == "seconds"
    assert units["eval.sets.NAME.every"] == "steps" and units["algorithm.overlong.buffer"] == "tokens"


def test_schema_is_of_yaml_as_editors_read_it() -> None:
    assert VALIDATOR.is_valid(yaml.safe_load("{name: a-1, algorithm: dapo, env: null, trainer: {lr: 0.001}}"))
    assert not VALIDATOR.is_valid(yaml.safe_load("{name: 'a b'}"))
