"""Tokens that were added to a tokenizer, and have no embedding."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.preflight.__main__ import preflight
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import convert

TINY = resolve("builtin:tiny")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base whose tokenizer has a token more than there are embeddings."""
    directory = tmp_path / "base"
    shutil.copytree(TINY, directory)
    library = Library.from_file(str(directory / "tokenizer.json"))
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    fill = [AddedToken(f"<{number}>") for number in range(size - library.get_vocab_size())]
    library.add_tokens([*fill, AddedToken("<tool>")])
    library.save(str(directory / "tokenizer.json"))
    return directory


def check(base: Path, rows: list[dict[str, Any]], **spec: Any) -> None:
    (base.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"model": {"path": str(base)}, "data": {"train": "rows.jsonl", "chat_template": "never"}}
    preflight(convert(usual | {"reward": {"name": "regex", "pattern": "x"}} | spec), cwd=base.parent)


ROWS = [{"prompt": "1", "answer": "1"}, {"prompt": "2 <tool>", "answer": "1"}]
TAUGHT = [{"prompt": "1", "completion": "1"}, {"prompt": "2", "completion": "<tool>"}]


@pytest.mark.parametrize("spec", [{}, {"data": {"train": "rows.jsonl", "streaming": True}}])
def test_prompt_with_a_token_beyond_embeddings_is_refused(spec: dict[str, Any], base: Path) -> None:
    with pytest.raises(SpecError, match=r"rows\.jsonl:2: the token <tool> has the id \d+, and there are"):
        check(base, ROWS, **spec)


def test_completion_with_a_token_beyond_embeddings_is_refused(base: Path) -> None:
    with pytest.raises(SpecError, match=r"rows\.jsonl:2: the token <tool> has the id"):
        check(base, TAUGHT, algorithm="sft", reward="exact_match")


def test_a_larger_tokenizer_alone_is_no_error(base: Path) -> None:
    check(base, ROWS[:1])


@pytest.mark.parametrize("key", ["eos_token_id", "text"])
def test_an_end_token_beyond_embeddings_is_refused(key: str, base: Path) -> None:
    name = "generation_config.json" if key == "eos_token_id" else "tokenizer_config.json"
    path = base / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    number = json.loads((base / "config.json").read_text())["vocab_size"]
    settings |= {key: [0, number]} if key == "eos_token_id" else {"eos_token": "<tool>"}
    path.write_text(json.dumps(settings))
    with pytest.raises(SpecError, match="model: what ends a completion: the token <tool> has the id"):
        check(base, ROWS[:1])


def test_rows_are_read_anew_for_fewer_embeddings(base: Path) -> None:
    larger = Tokenizer(base).digest
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    assert Tokenizer(base).digest != larger
