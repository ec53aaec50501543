"""Rows of several files: together, and mixed by weights."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lorad.client.overrides import changed
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.rl.completions.targets import TargetDataset, load_train
from lorad.rl.data import Dataset, Example, load_data, load_eval
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data, labels_of
from lorad.spec.text import load_spec

ALONE = "48fefc217a513a09061ea6cab2a211af1ce0225a37325f428b226c79e7f5ecbf"
MIXED = {"a.jsonl": 0.7, "b.csv": 0.3}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("builtin:tiny"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = [{"prompt": f"a{i}", "answer": str(i), "completion": "1"} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"b{i},{i},2" for i in range(4)]
    (tmp_path / "b.csv").write_text("\n".join(["prompt,answer,completion", *lines]))
    return tmp_path


def load(tokenizer: Tokenizer, cwd: Path, train: Any, seed: int = 0, **settings: Any) -> Dataset:
    return load_data(train, "train", Data(train=train, **settings), tokenizer, seed, cwd)


def names(examples: list[Example]) -> list[str]:
    return [example.prompt for example in examples]


def test_files_together_are_one_epoch(tokenizer: Tokenizer, files: Path) -> None:
    found = load(tokenizer, files, ["a.jsonl", "b.csv"])
    both = [[*map(str, names(found.take(start, 12)))] for start in (0, 12)]
    wanted = sorted([f"a{i}" for i in range(8)] + [f"b{i}" for i in range(4)])
    assert [sorted(epoch) for epoch in both] == [wanted] * 2 and both[0] != both[1]
    plain = load(tokenizer, files, ["a.jsonl", "b.csv"], shuffle=False).take(0, 12)
    assert names(plain) == wanted
    assert [plain[0].source, plain[-1].source] == ["a.jsonl", "b.csv"]


def test_weights_hold_at_every_position(tokenizer: Tokenizer, files: Path) -> None:
    found = load(tokenizer, files, MIXED).take(0, 200)
    for n in range(1, 201):
        assert abs(Counter(example.source for example in found[:n])["a.jsonl"] - 0.7 * n) < 1
    ids = [example.id for example in found]
    assert len(set(ids)) == 200  # no row comes twice in an epoch of its source
    firsts = [example.prompt for example in found if example.source == "a.jsonl"][:8]
    assert sorted(firsts) == [f"a{i}" for i in range(8)]


def test_mixture_is_the_same_from_any_position(tokenizer: Tokenizer, files: Path) -> None:
    whole = load(tokenizer, files, MIXED, seed=5).take(0, 60)
    again = load(tokenizer, files, MIXED, seed=5)
    pieces = [example for position in (40, 0, 20) for example in again.take(position, 20)]
    assert pieces == whole[40:] + whole[:40]
    assert names(whole[:10]) == ["a0", "b2", "a1", "a7", "a4", "b0", "a6", "a3", "b3", "a5"]
    assert names(load(tokenizer, files, MIXED, seed=6).take(0, 10)) != names(whole[:10])


def test_digest_tells_mixtures_from_one_file(tokenizer: Tokenizer, files: Path) -> None:
    one = load(tokenizer, files, "a.jsonl")
    assert one.digest == ALONE  # as before there were several
    assert names(one.take(0, 8)) == ["a0", "a2", "a1", "a4", "a6", "a7", "a3", "a5"]
    assert one.take(0, 1)[0].source == ""
    found = {load(tokenizer, files, given).digest for given in ("a.jsonl", ["a.jsonl"], ["a.jsonl", "b.csv"])}
    assert len(found) == 3


def test_held_out_problems_may_be_a_mixture(tokenizer: Tokenizer, files: Path) -> None:
    found = load_eval(Data(train="a.jsonl", eval={"a.jsonl": 1, "b.csv": 1}), tokenizer, 6, files)
    assert names(found) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_completions_come_from_several_files(tokenizer: Tokenizer, files: Path) -> None:
    texts = ["algorithm=sft", "data.train={a.jsonl: 3, b.csv: 1}"]
    found = load_train(load_spec("", overrides=texts), tokenizer, files)
    assert isinstance(found, TargetDataset)
    assert Counter(example.source for example in found.take(0, 40)) == {"a.jsonl": 30, "b.csv": 10}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("[]", "names 0 sources"),
        ("{}", "names 0 sources"),
        ("[a.jsonl, a.jsonl]", "twice"),
        ("{a.jsonl: 0, b.csv: 1}", "above 0"),
        ("{a.jsonl: .nan}", "finite"),
        ("{a.jsonl: -1}", "above 0"),
        ("{a.jsonl: much}", "much"),
    ],
)
def test_wrong_mixtures_are_refused(given: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        load_spec("", overrides=[f"data.train={given}"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a.jsonl", "none.jsonl"], "no file"),
        (["a.jsonl", "sort"], "builtin task"),
        (MIXED, "b.csv has no usable"),
    ],
)
def test_sources_without_rows_are_refused(tokenizer: Tokenizer, files: Path, given: Any, says: str) -> None:
    (files / "b.csv").write_text("prompt,answer\n" + "x" * 900 + ",1\n")
    with pytest.raises(SpecError, match=says) as refused:
        load(tokenizer, files, given)
    assert refused.value.hint


def test_labels_of_sources_differ() -> None:
    found = labels_of(["x/a.jsonl", "y/a.jsonl", "hub:org/name:train", "a b.csv", "/" * 50 + "a.jsonl"])
    assert [*found.values()][:4] == ["a.jsonl", "y_a.jsonl", "name_train", "a_b.csv"]
    assert len(set(found.values())) == 5


def test_typed_paths_of_several_sources_are_anchored(tmp_path: Path) -> None:
    sent = changed("data.train={a.jsonl: 7, sort: 3}", tmp_path)
    assert sent == f'data.train={{"{tmp_path}/a.jsonl": 7, "sort": 3}}'
    assert changed("data.eval=[a.csv, /b.json]", tmp_path) == f'data.eval=["{tmp_path}/a.csv", "/b.json"]'
