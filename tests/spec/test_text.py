"""The YAML of a spec and its overrides: numbers as people write them, errors with their line, no traps."""

import pytest
import yaml

from lorad.bounds import OVERRIDES
from lorad.errors import IntegrityError, SpecError, from_wire, to_wire
from lorad.spec.model import Spec, to_json
from lorad.spec.text import from_json, load_spec, load_task, merged, override


def refusal(text: str, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as refused:
        load_spec(text, source="spec.yaml", overrides=overrides)
    return refused.value


def test_a_text_becomes_a_spec() -> None:
    spec = load_spec(
        "name: sorter\nlora: {rank: 8, target_modules: [q_proj]}\nalgorithm:\n  clip: [0.2, 0.3]\n"
    )
    assert (spec.name, spec.lora.rank, spec.algorithm.clip) == ("sorter", 8, (0.2, 0.3))


def test_a_stored_spec_of_another_lorad_says_so() -> None:
    stored = to_json(Spec()).replace(b'"rank"', b'"router":"frozen","rank"')
    with pytest.raises(IntegrityError, match=r"spec is of another lorad: .* unknown field `router`"):
        from_json(stored)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_text_is_a_spec_of_defaults(text: str) -> None:
    assert load_spec(text) == Spec()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-5", 3e-5),
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1.e-2", 0.01),
        ("2", 2.0),
        ("+1.5e+1", 15.0),
    ],
)
def test_numbers_are_numbers_in_files_and_overrides(text: str, value: float) -> None:
    assert yaml.safe_load("3e-5") == "3e-5"  # what YAML 1.1 would make of it
    assert load_spec(f"trainer:\n  lr: {text}\n").trainer.lr == value
    assert load_spec("", overrides=[f"trainer.lr={text}"]).trainer.lr == value


@pytest.mark.parametrize("text", ["yes", "off", "1:30", "2026-11-21", "1_000", "'3e-5'", "0b1"])
def test_words_special_to_yaml_1_1_are_text(text: str) -> None:
    assert load_spec(f"data: {{train: {text}}}").data.train == text.strip("'")


def test_overrides_win_and_are_typed() -> None:
    spec = load_spec(
        "lora: {rank: 8}\n",
        overrides=[
            "lora.rank=4",
            "name=x",
            "deterministic=false",
            "lora.adapter_path=",
            "rollout.stop=[a, b]",
        ],
    )
    assert (spec.lora.rank, spec.name, spec.deterministic, spec.lora.adapter_path) == (4, "x", False, None)
    assert spec.rollout.stop == ["a", "b"]


def test_last_of_two_overrides_wins() -> None:
    """A value may hold an equals sign."""
    assert load_spec("", overrides=["seed=1", "seed=2"]).seed == 2
    assert load_spec("reward: regex", overrides=["reward.pattern=a=b"]).rewards[0].pattern == "a=b"


def test_merged_overrides_keep_the_newest_of_each() -> None:
    before = ["rollout.stop=[a]", "seed=1", "trainer.lr=1", "rollout={stop: [b]}", "rollout.top_p=0.5"]
    assert merged(before, ["trainer.lr=2", "rollout.top_p=0.9"]) == [
        "seed=1",
        "rollout={stop: [b]}",
        "trainer.lr=2",
        "rollout.top_p=0.9",
    ]
    assert override(Spec(), merged(before, ["seed=3"])) == override(Spec(), [*before, "seed=3"])
    many = [f"rollout.engine_args.x{number}=1" for number in range(OVERRIDES + 1)]
    with pytest.raises(SpecError, match=f"more than {OVERRIDES}"):
        merged(many[:OVERRIDES], many)


def test_an_override_does_not_reach_through_an_alias() -> None:
    text = "rollout: {engine_args: {a: &x {k: 1}, b: *x}}"
    args = load_spec(text, overrides=["rollout.engine_args.a.k=2"]).rollout.engine_args
    assert args == {"a": {"k": 2}, "b": {"k": 1}}


@pytest.mark.parametrize(("init", "is_of_base"), [("pissa", True), ("olora", True), ("gaussian", False)])
def test_inits_that_change_the_base_are_refused(init: str, is_of_base: bool) -> None:
    with pytest.raises(SpecError, match=r"lora\.init: Invalid enum value") as refused:
        load_spec(f"lora: {{init: {init}}}")
    assert ("changes the base" in refused.value.hint) is is_of_base
    assert "Choose one of: kaiming" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("seed: 1\nlora:\n  alpha: 1\n  rank: 0\n", "spec.yaml:4: lora.rank: Expected int >= 1"),
        ("seed: 1\n\nlora:\n  rnak: 3\n", "spec.yaml:4: lora.rnak: unknown key"),
        ("seeed: 1", "spec.yaml:1: seeed: unknown key"),
        ("lora: {rank: 1}\ntrainer: {betas: [0.9, 2]}", "spec.yaml:2: trainer.betas[1]: Expected float"),
        ("trainer: {loraplus_lr_ratio: 0}", "spec.yaml:1: trainer.loraplus_lr_ratio: Expected float > 0"),
        ("lora: {alpha: 1.0e+300}", "spec.yaml:1: lora.alpha: Expected float <= 1000000"),
        ("lora: 3", "spec.yaml:1: lora: Expected object"),
        ("- a", "spec.yaml:1: a spec is a mapping"),
        ("a: 1\nlora:\n  rank: 1\n  rank: 2\n", "spec.yaml:4: rank: the key is there twice"),
        ("seed: 1\n  bad: [", "spec.yaml:2: not YAML"),
        ("seed: 1\nname: 'open", "spec.yaml:2: not YAML"),
        ("a: 1\n---\nb: 1\n", "spec.yaml:2: not YAML"),
        ("a: &x [*x]", "spec.yaml:1: an alias that holds itself"),
        ("a: *nobody", "spec.yaml:1: not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "spec.yaml:1: tag:yaml.org,2002:python"),
        ("a: !!set {b, c}", "spec.yaml:1: tag:yaml.org,2002:set"),
        ("seed: !!int x", "spec.yaml:1: 'x'"),
        ("? [a]\n: 1", "spec.yaml:1: keys are plain words"),
        ("<<: {seed: 1}", "spec.yaml:1: keys are plain words"),
        ("a: " + "[" * 5000, "spec.yaml:1: not YAML: nested"),
        ("a: " + "1" * 5000, "spec.yaml:1: '1111"),
        ("a: \x00", "spec.yaml: not YAML"),
    ],
)
def test_error_begins_with_the_line_of_its_key(text: str, begins: str) -> None:
    refused = refusal(text)
    assert str(refused).startswith(begins)


def test_an_unknown_key_comes_with_the_nearest() -> None:
    assert refusal("", "trainer.lrr=1").hint == "Did you mean trainer.lr?"
    assert str(refusal("trainer: {lr: 1}", "trainer.lrr=1")).startswith(
        "override trainer.lrr=1: trainer.lrr: unknown"
    )


def test_error_blames_the_override_not_the_file() -> None:
    assert str(refusal("lora:\n  rank: 8\n", "lora.rank=0")).startswith(
        "override lora.rank=0: lora.rank: Expected"
    )
    assert "not of the form key=value" in str(refusal("", "lora.rank"))
    assert "not of the form key=value" in str(refusal("", "lora..rank=1"))
    assert "seed is 3, it has no keys" in str(refusal("seed: 3", "seed.x=1"))
    assert str(refusal("", "rollout.stop=[")).startswith("override rollout.stop=[")


def test_an_error_names_key_place_and_problem() -> None:
    refused = from_wire(to_wire(refusal("lora:\n  target_modules: [1]\n")))
    assert isinstance(refused, SpecError)
    assert (refused.where, refused.key, refused.problem) == (
        "spec.yaml:2",
        "lora.target_modules",
        "Expected str, got int",
    )
    assert refused.message == "spec.yaml:2: lora.target_modules[0]: Expected str, got int"


def test_all_errors_come_at_once_with_lines() -> None:
    refused = refusal(
        "seed: -1\nlora:\n  rnak: 3\n  alpha: x\ntrainer: {betas: [0.9, 2]}\n", "rollout.top_k=many"
    )
    lines = [error.message.partition(": Expected")[0] for error in (refused, *refused.others)]
    assert lines[0].startswith("spec.yaml:3: lora.rnak: unknown key")
    assert {"spec.yaml:1: seed", "spec.yaml:4: lora.alpha", "spec.yaml:5: trainer.betas[1]"} < set(lines)
    assert "override rollout.top_k=many: rollout.top_k" in lines and len(lines) == 5
    assert [error.message for error in from_wire(to_wire(refused)).others] == [
        e.message for e in refused.others
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "trainer.lr"),
        ("rank", "lora.rank"),
        ("every", "eval.every or checkpoint.every"),
        ("stepz", "trainer.steps"),
    ],
)
def test_key_without_section_gets_the_full_name(key: str, meant: str) -> None:
    assert refusal("", f"{key}=3").hint == f"Did you mean {meant}?"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "model.path and data.train are"),
        ("name: a", "model.path and data.train are"),
        ("model: {path: Qwen/Qwen3-8B}", "data.train is"),
        ("model: {path: x}\ndata: {eval: sort}", "data.train is"),
    ],
)
def test_spec_without_model_or_data_is_refused(text: str, missing: str) -> None:
    with pytest.raises(SpecError, match=f"s.yaml: {missing} missing"):
        load_task(text, source="s.yaml")


def test_builtin_base_needs_no_data() -> None:
    assert load_task("model: {path: 'builtin:tiny'}").data.train == "sort"
    assert load_task("model: {path: x}", overrides=["data.train=rows.jsonl"]).data.train == "rows.jsonl"


def test_names_can_have_capitals_but_no_spaces() -> None:
    assert load_spec("name: Qwen3-8B-GSM8K").name == "Qwen3-8B-GSM8K"
    refused = refusal("name: my run")
    assert "regex" not in refused.message and "A-Z" in refused.hint


def test_a_bomb_of_aliases_is_refused() -> None:
    levels = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    assert "more than 20 aliases" in str(refusal("\n".join(levels)))


def test_a_name_is_one_line() -> None:
    with pytest.raises(SpecError, match="name"):
        load_spec("", source="s", overrides=['name="abc\\n"'])
