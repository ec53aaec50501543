"""What a Python user gives, as the daemon takes it."""

from pathlib import Path
from typing import Any

import pytest

from lorad.api.inputs import axes, overrides, spec_text
from lorad.client.conditions import condition
from lorad.daemon.runs.draws import axes_of
from lorad.errors import SpecError
from lorad.spec.text import load_spec, override

numpy = pytest.importorskip("numpy")


def test_a_dict_is_a_spec() -> None:
    given = {"data": {"train": Path("sort")}, "trainer": {"lr": 1e-5, "steps": numpy.int64(7)}}
    spec = load_spec(spec_text(given)[0])
    assert (spec.data.train, spec.trainer.lr, spec.trainer.steps) == ("sort", 1e-5, 7)


def test_a_text_is_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec_text("seed: 3")[0] == "seed: 3"
    assert spec_text("{seed: 3}\n")[2] == str(tmp_path)


def test_a_file_is_a_spec(tmp_path: Path) -> None:
    file = tmp_path / "a b.yaml"
    file.write_text("seed: 4")
    assert spec_text(file) == spec_text(str(file)) == ("seed: 4", str(file), str(tmp_path))


@pytest.mark.parametrize("given", ["none.yaml", "none", "", "-", {"data": {"train": object()}}])
def test_what_is_no_spec_is_refused(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as raised:
        spec_text(given)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({"trainer": {"lr": 3e-5}}, "trainer", {"lr": 3e-5, "steps": 9}),
        ({"trainer.lr": 3e-5}, "trainer", {"lr": 3e-5, "steps": 9}),
        ({"algorithm": {"kl": {"coef": 0.5}}}, "algorithm", {"name": "rloo"}),
        ({"data": {"train": {"a.jsonl": 0.7}}}, "data", {"eval": "sort"}),
        ({"reward": {"name": "regex", "pattern": "a: b, 'c'"}}, "reward", {"pattern": "a: b, 'c'"}),
        ({"lora": {"target_modules": ["q_proj", "*_proj"]}}, "lora", {"rank": 2}),
    ],
)
def test_keys_change_what_they_name(given: dict[str, Any], key: str, expected: dict[str, Any]) -> None:
    before = load_spec(
        "{trainer: {steps: 9}, algorithm: {name: rloo}, data: {train: sort, eval: sort}, lora: {rank: 2}}"
    )
    after = override(before, overrides(given))
    assert getattr(after, key) != getattr(before, key)
    assert {name: getattr(getattr(after, key), name) for name in expected} == expected


@pytest.mark.parametrize("value", ["true", "1e5", "a: b", "null", "x,y", "with 'quotes\" in it", "*_proj"])
def test_text_stays_text(value: str) -> None:
    (made,) = overrides({"model": {"path": value}})
    assert override(load_spec("{}"), [made]).model.path == value


def test_a_grid_spans_its_values() -> None:
    made = axes({"trainer.lr": [1e-5, 3e-4], "lora.target_modules": [["q_proj", "v_proj"], ["all-linear"]]})
    found, rest = axes_of([*made, "seed=3"])
    assert found["trainer.lr"] == ["1e-05", "0.0003"] and rest == ["seed=3"]
    assert len(found["lora.target_modules"]) == 2


@pytest.mark.parametrize("values", ["abc", [], 3])
def test_a_key_without_values_is_refused(values: Any) -> None:
    with pytest.raises(SpecError, match=r"seed: .*list of values"):
        axes({"seed": values})


@pytest.mark.parametrize(
    ("text", "figures", "holds"),
    [
        ("eval>0.9", {"eval": 0.95}, True),
        ("eval > 0.9", {"eval": 0.9}, False),
        ("step>=20", {"step": 20}, True),
        ("eval/hard/pass@4>=0.5", {"eval/hard/pass@4": 0.5}, True),
        ("loss<1e-2", {"loss": None}, False),
        ("loss<=1e-2", {}, False),
        ("reward_of/a.jsonl==1", {"reward_of/a.jsonl": 1.0}, True),
    ],
)
def test_a_condition_compares_a_figure(text: str, figures: dict[str, float | None], holds: bool) -> None:
    assert condition(text).holds(figures) is holds


@pytest.mark.parametrize("text", ["", "eval", "eval>", "eval>much", ">3", "eval=3", "eval>1 and loss<2"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="no condition"):
        condition(text)
