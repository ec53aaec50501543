"""The form of a new run: from fields to YAML and back, the messages about mistakes, and the screen by keys
alone.
"""

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.errors import SpecError
from lorad.records.runs import RunDetails
from lorad.spec.model import Spec, convert
from lorad.spec.templates import TEMPLATES
from lorad.spec.text import load_spec
from lorad.tui.actions.verbs import settings
from lorad.tui.draft import MORE, DraftSource, command, draw_up, overrides, rebased
from lorad.tui.new_run import sources
from lorad.tui.spec_fields import entry, usual
from lorad.tui.spec_lines import DEFAULTS, Flat, flat, inner_text, nested, text_of, value_text

HERE = Path("/here")
ODD = [
    "x",
    "null",
    "~",
    "1",
    "1e-3",
    "a: b",
    "a #b",
    "[x]",
    "é",
    "\x1b[2J",
    "\x9b\x7f\u202e\U000e0001",
    "😀",
    "...",
    "--",
    "a.py:f",
    "true",
    " x",
    "",
]


# -- YAML ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ODD)
def test_any_text_reads_as_it_was_written(text: str) -> None:
    data = {
        "model.path": text,
        "rollout.stop": [text, "b"],
        "rollout.engine_args": {text or "k": [text, 1, None]},
    }
    written = text_of(data)
    assert all(character.isprintable() or character == "\n" for character in written)
    if text:
        assert flat(msgspec.to_builtins(load_spec(written)))["model.path"] == text
    assert load_spec(f"rollout: {{stop: {inner_text(['a', text or 'b'])}}}").rollout.stop[1] == (text or "b")


def test_all_defaults_as_yaml_are_the_default_spec() -> None:
    assert load_spec(text_of(DEFAULTS)) == Spec()
    assert nested(flat(nested(DEFAULTS))) == nested(DEFAULTS)


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_default_can_be_typed_into_its_field(key: str) -> None:
    value = DEFAULTS[key]
    assert value is None or entry(key).value(entry(key).text(value)) == value


def test_every_key_says_what_it_means() -> None:
    assert [key for key in DEFAULTS if "; " not in entry(key).says] == []


def test_every_field_is_a_described_spec_key() -> None:
    assert set(usual()) <= set(DEFAULTS)
    assert all(entry(key).says for key in usual())
    assert entry("trainer.schedule").choices == ("constant", "linear", "cosine")
    assert "whole number > 0" in entry("lora.rank").says and entry("lora.rank").default == "16"


# -- what is typed -------------------------------------------------------------------------------------------
def test_only_filled_fields_are_in_the_yaml() -> None:
    draft = draw_up({"lora.rank": "8", "trainer.lr": "3e-5", "data.train": "", "trainer.schedule": "cosine"})
    assert draft.text == "lora:\n  rank: 8\ntrainer:\n  lr: 3e-5\n  schedule: cosine\n"
    assert draft.wrong == {}


def test_all_wrong_fields_are_reported_at_once() -> None:
    draft = draw_up({"lora.rank": "zero", "trainer.lr": "-1", "trainer.steps": "5", "name": "Bad Name"})
    assert set(draft.wrong) == {"lora.rank", "trainer.lr", "name"}
    with pytest.raises(SpecError) as refused:
        convert({"lora": {"rank": "zero"}})
    assert refused.value.message.partition(": ")[2] in draft.wrong["lora.rank"]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("lora.rnk=8", "Did you mean lora.rank"),
        ("lora.rank", "key=value"),
        ("a='", "quote"),
        ("lora.rank=x", "int"),
    ],
)
def test_other_settings_are_checked_as_they_are_typed(typed: str, told: str) -> None:
    assert told in draw_up({}, typed).wrong[MORE]
    assert told in settings(typed)


def test_setting_needing_the_whole_spec_is_accepted() -> None:
    assert settings("reward.pattern=a+ trainer.betas='[0.9, 0.98]'") == ""


def test_other_settings_win_over_fields() -> None:
    draft = draw_up({"lora.rank": "8"}, "lora.rank=4 trainer.betas='[0.9, 0.98]'")
    assert load_spec(draft.text).lora.rank == 4 and load_spec(draft.text).trainer.betas == (0.9, 0.98)


def test_a_secret_is_refused_where_it_is_typed() -> None:
    draft = draw_up({}, "rollout.engine_args='{api_key: abc}'")
    assert "secret" in draft.wrong[MORE] and "key_file" in draft.wrong[MORE]


# -- sources -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TEMPLATES)
def test_template_form_equals_the_spec_of_init(name: str) -> None:
    source = sources.of_template(name)
    draft = draw_up(source.texts)
    assert load_spec(draft.text) == load_spec(TEMPLATES[name].filled()) and not draft.wrong


def a_spec(**more: Any) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(convert(more))
    return data


def test_form_of_a_run_drops_only_the_name() -> None:
    spec = a_spec(
        name="old", lora={"rank": 4}, trainer={"betas": [0.9, 0.98]}, rollout={"engine_args": {"a": {"b": 1}}}
    )
    source = sources.of_run(RunDetails("old", "ended", spec=spec, cwd="/there"))
    assert source.cwd == Path("/there") and source.texts["name"] == ""
    assert load_spec(draw_up(source.texts).text) == convert({**spec, "name": None})


def test_unknown_start_of_paths_is_noted() -> None:
    run = RunDetails("old", "ended", spec=a_spec(data={"train": "d.jsonl"}), origin="base@3")
    assert "data.train" in sources.of_run(run).note and "base@3" in sources.of_run(run).note


def test_file_with_a_bad_spec_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("lora:\n  rank: 8\n  rank: 9\n")
    with pytest.raises(SpecError, match=r"bad\.yaml:3"):
        sources.of_file(path)
    with pytest.raises(SpecError, match=r"none\.yaml: No such file"):
        sources.of_file(tmp_path / "none.yaml")


# -- the shell's way -----------------------------------------------------------------------------------------
def the_same(line: str, text: str) -> Spec:
    """What `lorad run` makes of its words."""
    words = shlex.split(line.partition("lorad run ")[2].partition(" <")[0])
    return load_spec(text, overrides=words[1:])


@pytest.mark.parametrize("command_of", ["lorad run run.yaml", ""])
def test_the_command_starts_the_same_run(command_of: str) -> None:
    given: Flat = {"lora.rank": 8, "data.eval": "e f.jsonl", "trainer.betas": [0.9, 0.98], "trainer.steps": 5}
    source = DraftSource("x", given, HERE, command_of)
    typed = source.texts | {
        "data.eval": "",
        "trainer.lr": "3e-5",
        "name": "it",
        "trainer.steps": "60",
        "lora.alpha": "1",
    }
    values = draw_up(typed).values
    told = command(source, values, HERE)
    assert the_same(told, text_of(given) if command_of else "") == load_spec(text_of(values))


def test_command_changes_into_the_paths_directory() -> None:
    assert (
        command(DraftSource("x", {}, Path("/a b")), {"seed": 1}, HERE)
        == "cd '/a b' && lorad run - seed=1 < /dev/null"
    )


def test_what_is_gone_becomes_its_default() -> None:
    assert overrides({"lora.rank": 8, "data.eval": "x", "seed": 0}, {"seed": 0}) == {
        "lora.rank": 16,
        "data.eval": None,
    }


def test_paths_are_rebased_to_another_directory(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "r.py").touch()
    values: Flat = {"data.train": "d.jsonl", "data.eval": "sort", "reward": "r.py:f", "lora.rank": 1}
    moved = rebased(values, tmp_path, HERE)
    assert moved == values | {"data.train": f"{tmp_path}/d.jsonl", "reward": f"{tmp_path}/r.py:f"}
    assert rebased(values, tmp_path, tmp_path) == values


def test_overwriting_a_file_warns_of_loss(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert sources.lost_by_writing(path) == ""
    sources.write(path, "seed: 1\n")
    assert "lost" in sources.lost_by_writing(path) and path.read_text() == "seed: 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_values_are_quoted_only_where_needed() -> None:
    assert [value_text(value) for value in ("a.py:f", "a b", None, 1e-5, [True])] == [
        "a.py:f",
        '"a b"',
        "null",
        "1e-5",
        "[true]",
    ]
