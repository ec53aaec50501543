"""Rows of chats become the tokens and the masks of transformers, for the templates of six families."""

import json
from pathlib import Path

import pytest

from lorad.errors import SpecError
from tests.rl.chats.compare import compare, model, read
from tests.rl.chats.goldens import ROWS, made, packed
from tests.rl.chats.reference import FAMILIES, GOLDENS


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_become_the_golden_tokens(family: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / f"{family}.json").read_text())
    with model(family, tmp_path) as tokenizer:
        for name, row in ROWS.items():
            if not isinstance(golden[name], list):
                with pytest.raises(SpecError, match=golden[name] or "the turn cannot be found"):
                    read(tokenizer, tmp_path, row)
                continue
            assert packed(read(tokenizer, tmp_path, row)) == golden[name], name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_goldens_are_transformers_own(family: str) -> None:
    golden = json.loads((GOLDENS / f"{family}.json").read_text())
    assert {name: packed(samples) for name, samples in made(family).items()} == golden


@pytest.mark.parametrize("family", FAMILIES)
def test_random_rows_are_as_in_transformers(family: str, tmp_path: Path) -> None:
    found = compare(family, 12, 41, tmp_path)
    assert found["same"] > 3 and set(found) <= {"same", "refused by both"}


@pytest.mark.system
@pytest.mark.parametrize("rows", [50, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_rows_are_as_in_transformers(family: str, rows: int, tmp_path: Path) -> None:
    found = compare(family, rows, 42, tmp_path)
    assert found["same"] > rows / 2 and set(found) <= {"same", "refused by both", "cut at the turn"}
