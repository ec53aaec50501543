"""Rows that were made ready: found again by what they follow from, out of memory, and their user's alone."""

import datetime
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lorad.errors import LoradError
from lorad.rl.completions.targets import TargetDataset, load_train
from lorad.rl.data import load_data
from lorad.rl.kept import cache, rows
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.model import convert
from tests.rl.large.test_long_chats import Counted, everything
from tests.rl.test_chat_templates import TEMPLATES, write
from tests.rl.test_targets import CHAT, load

WIDE = Data(max_prompt_tokens=10_000)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are many."""
    monkeypatch.setattr(rows, "_IN_MEMORY", 1000)
    monkeypatch.setattr(cache, "_LEAST", 0)


def chats(first: str = "0", count: int = 20) -> list[Any]:
    said = [first, *map(str, range(1, count))]
    return [{"messages": [CHAT[0], {"role": "assistant", "content": text}], "answer": text} for text in said]


def model(directory: Path, family: str = "chatml") -> Counted:
    write(directory, (TEMPLATES / f"{family}.jinja").read_text())
    return Counted(directory)


def files(home: Path) -> list[Path]:
    return sorted((home / "rows").iterdir())


def test_the_next_attempt_renders_nothing(home: Path, tmp_path: Path) -> None:
    first = load(model(tmp_path), tmp_path, *chats())
    again = model(tmp_path)
    found = load(again, tmp_path, *chats())
    assert again.messages == 0 and again.characters < 100 and len(files(home)) == 1
    assert everything(found) == everything(first)
    facts = [(one.digest, one.tokens_digest, one.form, one.has_answers) for one in (first, found)]
    assert facts[0] == facts[1] and [*first.rows] == [*found.rows]


def test_prompts_are_found_again(home: Path, tmp_path: Path) -> None:
    lines = "".join(f'{{"prompt": "{"x" * place}", "answer": "{place}"}}\n' for place in range(1, 40))
    (tmp_path / "rows.jsonl").write_text(lines)
    first, again = (
        load_data("rows.jsonl", "train", Data(max_prompt_tokens=24), model(tmp_path), 0, tmp_path)
        for _ in range(2)
    )
    assert first.take(0, 50) == again.take(0, 50) and len(files(home)) == 1
    assert first.dropped == again.dropped > 0 and [*first.prompt_lengths] == [*again.prompt_lengths]


def same(tmp_path: Path) -> TargetDataset:
    return load(model(tmp_path), tmp_path, *chats())


@pytest.mark.parametrize(
    "other",
    [
        lambda path: load(model(path), path, *chats("9")),
        lambda path: load(model(path), path, *chats(), max_sample_tokens=50),
        lambda path: load(model(path, "llama3"), path, *chats()),
        lambda path: load(model(path), path, *chats(), system="Be brief."),
    ],
)
def test_what_rows_follow_from_is_compared(
    other: Callable[[Path], TargetDataset], home: Path, tmp_path: Path
) -> None:
    first = same(tmp_path)
    assert everything(other(tmp_path)) != everything(first) or len(files(home)) == 2
    assert everything(same(tmp_path)) == everything(first)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.chmod(0o644),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"lorad/r1", b"lorad/r0")),
        lambda path: path.write_bytes(b""),
        lambda path: (path.rename(path.with_suffix(".old")), path.symlink_to(path.with_suffix(".old"))),
    ],
)
def test_a_file_that_is_not_whole_is_not_used(
    harm: Callable[[Path], object], home: Path, tmp_path: Path
) -> None:
    first = everything(same(tmp_path))
    harm(files(home)[0])
    again = model(tmp_path)
    assert everything(load(again, tmp_path, *chats())) == first and again.messages > 0


def test_a_damaged_row_is_refused(home: Path, tmp_path: Path) -> None:
    same(tmp_path)
    with files(home)[0].open("r+b") as file:
        file.seek(60)
        file.write(b"\xff\xff")
    with pytest.raises(LoradError, match="damaged"):
        everything(same(tmp_path))


def test_the_files_used_longest_ago_go(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same(tmp_path)
    (oldest,) = files(home)
    monkeypatch.setattr(cache, "KEPT_BYTES", oldest.stat().st_size * 3 // 2)
    os.utime(oldest, (0, 0))
    abandoned = home / "rows" / ".1-a.tmp"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    load(model(tmp_path), tmp_path, *chats("9"))
    assert len(files(home)) == 1 and not oldest.exists()


def test_without_a_place_rows_stay_in_memory(home: Path, tmp_path: Path) -> None:
    (home / "rows").write_text("in the way")
    assert len(everything(same(tmp_path))) == 20


def test_values_beyond_json_stay_what_they_are(home: Path, tmp_path: Path) -> None:
    on = datetime.date(2026, 11, 27)
    table = pyarrow.table({"prompt": ["hm " * 300] * 5, "answer": ["1"] * 5, "on": [on] * 5})
    parquet.write_table(table, tmp_path / "rows.parquet")
    data = load_data("rows.parquet", "train", WIDE, Tokenizer(model_at(tmp_path)), 0, tmp_path)
    assert {row.values["on"] for row in data.rows} == {on} and files(home) == []


def model_at(directory: Path) -> Path:
    return write(directory, (TEMPLATES / "chatml.jinja").read_text())


def test_many_rows_take_little_memory(home: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_at(tmp_path))
    row = '{"prompt": "' + "hm " * 100 + '", "completion": "1"}\n'
    peaks = []
    for count in (2_000, 8_000):
        (tmp_path / "rows.jsonl").write_text(row * count)
        spec = convert({"algorithm": "sft", "data": {"train": "rows.jsonl"}})
        tracemalloc.start()
        assert load_train(spec, tokenizer, tmp_path).size == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 6_000 * 200  # a row in memory takes 3,000 bytes
