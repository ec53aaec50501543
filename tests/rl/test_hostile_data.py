"""Files of data that would take all memory, or never end: each is refused with a sentence, at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.errors import SpecError
from lorad.protocol.inputs import look
from lorad.rl import sources
from lorad.rl.sources import read_rows
from lorad.rl.streaming.reader import reader_of
from tests.kit.world import REPOSITORY

ROW = '{"prompt": "S:1=", "answer": "1"}\n'
BOMB = """
import pathlib, sys
import numpy, pyarrow, pyarrow.parquet
from lorad.box import memory
from lorad.rl.sources import read_rows
one = pyarrow.DictionaryArray.from_arrays(numpy.zeros(4096, numpy.int32), pyarrow.array(["x" * (1 << 20)]))
pyarrow.parquet.write_table(pyarrow.table({"prompt": one}), "bomb.parquet", compression="zstd")
assert pathlib.Path("bomb.parquet").stat().st_size < 20_000
memory._LEAST, memory.available_memory = 256 << 20, lambda: 0
list(read_rows("bomb.parquet", "train", pathlib.Path()))
"""


def refused(source: str, cwd: Path) -> str:
    with pytest.raises(SpecError) as refused:
        list(read_rows(source, "train", cwd))
    assert refused.value.hint
    return str(refused.value)


@pytest.mark.parametrize("suffix", sources.SUFFIXES)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pipe", "a pipe, not a file"),
        ("device", "a device, not a file"),
        ("loop", "symbolic links"),
        ("hole", "nothing was written at byte 0"),
    ],
)
def test_what_is_no_file_of_rows_is_refused(suffix: str, kind: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)
        case "hole":
            path.touch()
            os.truncate(path, 1 << 40)
    assert says in refused(path.name, tmp_path)
    with pytest.raises(SpecError, match=says):
        reader_of(path.name, "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "head", "line"), [("a.jsonl", "", ROW), ("a.csv", "prompt,answer\n", "S,1\n")]
)
def test_line_that_never_ends_is_refused(
    name: str, head: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ROW_BYTES", 1 << 10)
    (tmp_path / name).write_text(head + 4 * line + "x" * 2000)
    assert f"{name}:{5 + bool(head)}: the line is longer than" in refused(name, tmp_path)


@pytest.mark.parametrize(("name", "line"), [("a.jsonl", ROW), ("a.csv", "S:1=,1\n")])
def test_file_that_grows_while_read_is_refused(name: str, line: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(5000 * line)
    rows = read_rows(name, "train", tmp_path)
    next(rows)
    with (tmp_path / name).open("a") as file:
        file.write(5000 * line)
    with pytest.raises(SpecError, match="grew while it was read"):
        list(rows)


@pytest.mark.system
def test_small_parquet_of_gigabytes_is_refused(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(
        [sys.executable, "-c", BOMB], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "SpecError: data: bomb.parquet takes over 256.0 MiB of memory" in done.stderr


def test_an_input_that_became_a_pipe_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(OSError, match="a pipe, not a file"):
        look(tmp_path / "rows.jsonl")
