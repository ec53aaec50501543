"""Rows of the examples: the files that are in the repository, and the scripts that write the others."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

from lorad.errors import SpecError
from lorad.rl.sources import read_rows
from lorad.spec.data import names_of
from lorad.spec.text import load_spec
from tests.kit.world import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
SOLVED = "He eats 2 of 5.\n5 - 2 = <<5-2=3>>3\n#### 3"


def write(name: str, *words: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def additions(path: Path) -> set[tuple[int, int]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert all(int(row["a"]) + int(row["b"]) == int(row["answer"]) for row in rows)
    return {(int(row["a"]), int(row["b"])) for row in rows}


def test_additions_are_what_their_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("addition.py", tmp_path, monkeypatch=monkeypatch)
    for name in ("train.csv", "test.csv"):
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "addition" / name).read_bytes()
    train, test = (additions(tmp_path / name) for name in ("train.csv", "test.csv"))
    assert (len(train), len(test), train & test) == (2000, 128, set())


def test_gsm8k_is_written_from_published_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "How many?", "answer": SOLVED}))
    write("gsm8k.py", tmp_path / "out", "--from", tmp_path, monkeypatch=monkeypatch)
    (row,) = map(json.loads, (tmp_path / "out" / "test.jsonl").read_text().splitlines())
    assert (row["answer"], row["solution"]) == ("3", SOLVED) and row["prompt"].startswith("How many?")
    keys = load_spec((EXAMPLES / "smollm2-gsm8k.yaml").read_text()).data
    assert {keys.prompt_key, keys.completion_key, keys.answer_key} == row.keys()


def test_a_missing_file_names_its_script(tmp_path: Path) -> None:
    data = load_spec((EXAMPLES / "smollm2-gsm8k.yaml").read_text()).data
    missing = tmp_path / "gsm8k" / Path(*names_of(data.train)).name
    with pytest.raises(SpecError) as caught:
        read_rows(str(missing), "train", tmp_path)
    assert "`python examples/gsm8k.py` in the repository writes it" in caught.value.hint
    with pytest.raises(SpecError) as caught:
        read_rows(str(tmp_path / "mine" / "train.jsonl"), "train", tmp_path)
    assert "python" not in caught.value.hint
