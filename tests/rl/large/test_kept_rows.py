"""Rows that were made ready: found again by what they follow from, out of memory, and their user's alone."""

import datetime
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lorad.errors import LoradError
from lorad.models.directory import resolve
from lorad.rl.completions.targets import TargetDataset, load_train
from lorad.rl.data import load_data
from lorad.rl.kept import cache, rows
from lorad.spec.data import Data
from lorad.spec.model import convert
from tests.rl.large.test_long_chats import Counted, everything
from tests.rl.test_targets import load

WIDE = Data(max_prompt_tokens=10_000)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are many."""
    monkeypatch.setattr(rows, "_IN_MEMORY", 1000)
    monkeypatch.setattr(cache, "_LEAST", 0)


def texts(first: str = "0", count: int = 20) -> list[Any]:
    said = [first, *map(str, range(1, count))]
    return [{"prompt": "S:2,1=" * 9, "completion": text, "answer": text} for text in said]


def model(directory: Path, behind: str = "") -> Counted:
    """The tokenizer of builtin:tiny without a chat template."""
    tiny = resolve("builtin:tiny")
    (directory / "tokenizer.json").write_text((tiny / "tokenizer.json").read_text() + behind)
    shutil.copy(tiny / "config.json", directory)
    return Counted(directory)


def files(home: Path) -> list[Path]:
    return sorted((home / "rows").iterdir())


def test_the_next_attempt_renders_nothing(home: Path, tmp_path: Path) -> None:
    first = load(model(tmp_path), tmp_path, *texts())
    again = model(tmp_path)
    found = load(again, tmp_path, *texts())
    assert again.characters == 0 and len(files(home)) == 1
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
    return load(model(tmp_path), tmp_path, *texts())


@pytest.mark.parametrize(
    "other",
    [
        lambda path: load(model(path), path, *texts("9")),
        lambda path: load(model(path), path, *texts(), max_sample_tokens=400),
        lambda path: load(model(path, " "), path, *texts()),
        lambda path: load(model(path), path, *texts(), too_long="truncate"),
    ],
)
def test_what_rows_follow_from_is_compared(
    other: Callable[[Path], TargetDataset], home: Path, tmp_path: Path
) -> None:
    first = same(tmp_path)
    other(tmp_path)
    assert len(files(home)) == 2 and everything(same(tmp_path)) == everything(first)


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
def test_files_that_are_not_whole_are_unused(
    harm: Callable[[Path], object], home: Path, tmp_path: Path
) -> None:
    first = everything(same(tmp_path))
    harm(files(home)[0])
    again = model(tmp_path)
    assert everything(load(again, tmp_path, *texts())) == first and again.characters > 0


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
    load(model(tmp_path), tmp_path, *texts("9"))
    assert len(files(home)) == 1 and not oldest.exists()


def test_without_a_place_rows_stay_in_memory(home: Path, tmp_path: Path) -> None:
    (home / "rows").write_text("in the way")
    assert len(everything(same(tmp_path))) == 20


def test_values_beyond_json_stay_what_they_are(home: Path, tmp_path: Path) -> None:
    on = datetime.date(2026, 11, 27)
    table = pyarrow.table({"prompt": ["S:2,1=" * 99] * 5, "answer": ["1"] * 5, "on": [on] * 5})
    parquet.write_table(table, tmp_path / "rows.parquet")
    data = load_data("rows.parquet", "train", WIDE, model(tmp_path), 0, tmp_path)
    assert {row.values["on"] for row in data.rows} == {on} and files(home) == []


@pytest.mark.system
def test_many_rows_take_little_memory(home: Path, tmp_path: Path) -> None:
    tokenizer = model(tmp_path)
    row = '{"prompt": "' + "S:2,1=" * 30 + '", "completion": "1"}\n'
    held = []
    for count in (200, 201, 801):  # the first imports and remembers
        (tmp_path / "rows.jsonl").write_text(row * count)
        spec = convert({"algorithm": "sft", "data": {"train": "rows.jsonl"}})
        tracemalloc.start()
        found = load_train(spec, tokenizer, tmp_path)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert found.size == count
    assert held[2] - held[1] < 600 * 200  # a row in memory takes a thousand bytes and more
