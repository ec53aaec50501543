"""Names of target modules, in every form that users write them."""

from pathlib import Path

import pytest

from lorad.adapters.peft import outline, read_peft, write_peft
from lorad.adapters.prefixes import adapter_for, outline_for
from lorad.adapters.targets import match_modules, renamed
from lorad.adapters.validate import refuse_unfit, validate
from lorad.errors import SpecError
from tests.kit.fakes.random_adapters import random_adapter

LEAVES = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
SHAPES = {
    f"model.layers.{layer}.{part}.{leaf}": (8, 8)
    for layer in (0, 1)
    for part, leaves in LEAVES.items()
    for leaf in leaves
} | {"lm_head": (16, 8)}


def leaves(*targets: str, exclude: str | list[str] = ()) -> set[str]:  # type: ignore[assignment]
    return {name.rpartition(".")[2] for name in match_modules(SHAPES, list(targets), exclude)}


def test_all_linear_is_every_linear_but_the_head() -> None:
    assert match_modules(SHAPES, "all-linear", ["lm_head"]) == tuple(sorted(set(SHAPES) - {"lm_head"}))
    assert match_modules(SHAPES, "all-linear") == match_modules(SHAPES, "all-linear", ["lm_head"])


def test_head_can_be_targeted_or_excluded_when_absent() -> None:
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head"}
    assert len(match_modules(tied, "all-linear", ["lm_head"])) == 14
    assert match_modules(SHAPES, ["lm_head"]) == ("lm_head",)


def test_names_are_sorted_and_come_once() -> None:
    names = match_modules(SHAPES, "v_proj, q_proj,linear_qkv,self_attn.k_proj")
    assert list(names) == sorted(set(names))
    assert len(names) == 6


@pytest.mark.parametrize(
    ("megatron", "hugging_face"),
    [
        ("linear_qkv", {"q_proj", "k_proj", "v_proj"}),
        ("linear_proj", {"o_proj"}),
        ("linear_fc1", {"gate_proj", "up_proj"}),
        ("linear_fc2", {"down_proj"}),
        ("linear_q", {"q_proj"}),
        ("linear_k", {"k_proj"}),
        ("linear_v", {"v_proj"}),
        ("linear_fc1_gate", {"gate_proj"}),
        ("linear_fc1_up", {"up_proj"}),
    ],
)
def test_megatron_names_mean_the_linears_that_they_fuse(megatron: str, hugging_face: set[str]) -> None:
    assert leaves(megatron) == hugging_face


def test_wildcards_go_over_the_full_name() -> None:
    assert match_modules(SHAPES, "*.layers.0.*.q_proj") == ("model.layers.0.self_attn.q_proj",)
    assert match_modules(SHAPES, "decoder.layers.1.self_attention.linear_proj") == (
        "model.layers.1.self_attn.o_proj",
    )
    assert len(match_modules(SHAPES, "*.layers.1.*.linear_qkv")) == 3


def test_a_full_name_is_one_module() -> None:
    assert match_modules(SHAPES, "model.layers.1.mlp.up_proj") == ("model.layers.1.mlp.up_proj",)


def test_name_matches_no_part_of_another() -> None:
    with pytest.raises(SpecError, match="'proj'"):
        match_modules(SHAPES, "proj")


def test_excludes_take_the_same_forms() -> None:
    assert leaves("all-linear", exclude=["linear_fc1", "q_proj"]) == {
        "k_proj",
        "v_proj",
        "o_proj",
        "down_proj",
    }
    assert len(match_modules(SHAPES, "all-linear", "*.layers.0.*")) == 7


def test_unmatched_target_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(SpecError) as refused:
        match_modules(SHAPES, ["q_proj", "v_prj"])
    assert "lora.target_modules: 'v_prj'" in str(refused.value)
    assert "did you mean v_proj?" in refused.value.hint
    assert "down_proj" in refused.value.hint


def test_an_exclude_that_matches_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"lora\.exclude_modules: 'o_prj'"):
        match_modules(SHAPES, "all-linear", "o_prj")


@pytest.mark.parametrize(
    ("targets", "exclude"), [("q_proj", "linear_qkv"), ([], []), ("lm_head", ["lm_head"])]
)
def test_nothing_left_is_refused(targets: str | list[str], exclude: str | list[str]) -> None:
    with pytest.raises(SpecError, match="no module is left"):
        match_modules(SHAPES, targets, exclude)


def test_what_cannot_match_is_not_offered_again() -> None:
    with pytest.raises(SpecError, match="'all-linear' matches no linear") as refused:
        match_modules({"lm_head": (16, 8)}, "all-linear")
    assert "there is lm_head alone" in refused.value.hint and "did you mean" not in refused.value.hint
    with pytest.raises(SpecError) as refused:
        match_modules({"model.layers.0.self_attn.q_proj": (8, 8)}, "linear_fc1")
    assert "did you mean linear_fc1?" not in refused.value.hint


def test_a_model_without_linears_is_refused_as_such() -> None:
    with pytest.raises(SpecError, match="there is no linear to put an adapter on"):
        match_modules({}, "all-linear")


def test_names_differ_in_what_stands_before_layers() -> None:
    base = ["model.language_model.layers.0.mlp.up_proj", "lm_head"]
    for prefix in ("model", "language_model.model", "backbone"):
        assert renamed([f"{prefix}.layers.0.mlp.up_proj"], base) == {
            f"{prefix}.layers.0.mlp.up_proj": base[0]
        }
    assert renamed(["model.layers.1.q"], base) == {"model.layers.1.q": "model.layers.1.q"}


def test_names_that_may_be_two_are_refused() -> None:
    with pytest.raises(SpecError, match=r"may be a\.layers\.0\.q or b\.layers\.0\.q"):
        renamed(["model.layers.0.q"], ["a.layers.0.q", "b.layers.0.q"])


@pytest.mark.parametrize("prefix", ["model", "model.language_model", "language_model.model", "backbone"])
def test_adapters_with_another_prefix_are_read(tmp_path: Path, prefix: str) -> None:
    base = {name.replace("model.", "model.language_model.", 1): shape for name, shape in SHAPES.items()}
    theirs = {name.replace("model", prefix, 1): shape for name, shape in SHAPES.items() if name != "lm_head"}
    write_peft(random_adapter(theirs, 1, rank=2, std=0.2), tmp_path, "base")
    refuse_unfit(outline_for(base, outline(tmp_path)), base)
    validate(adapter_for(base, read_peft(tmp_path)), base)
