"""Compares what lorad makes of rows with what transformers does."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from lorad.errors import SpecError
from lorad.rl.completions.targets import TargetDataset, load_train
from lorad.rl.data import load_data
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.model import convert
from tests.rl.chats.random_chats import row_of
from tests.rl.chats.reference import GOLDENS, Sample, golden, prompt_of, samples_of

ENDS: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_end|>",),
    "hermes": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",),
    "mistral": ("</s>",),
}
ENDS |= {"gpt_oss": ("<|return|>", "<|call|>"), "parts": ("<end_of_turn>",), "deepseek": ("</s>",)}


@contextmanager
def model(family: str, directory: Path) -> Iterator[Tokenizer]:
    """lorad's tokenizer of a family."""
    shutil.copy(GOLDENS / "tokenizer.json", directory)
    shutil.copy(GOLDENS / f"{family}.jinja", directory / "chat_template.jinja")
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [golden(family).convert_tokens_to_ids(end) for end in ENDS[family]]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    made = Tokenizer(directory)
    try:
        yield made
    finally:
        made.close()


def of_parquet(row: dict[str, Any], cwd: Path) -> dict[str, Any] | None:
    """Write a row as Parquet, and return it as it is there; None where Parquet has no place for it."""
    try:
        parquet.write_table(pyarrow.Table.from_pylist([row]), cwd / "rows.parquet")
    except (pyarrow.ArrowException, NotImplementedError):
        return None
    (found,) = parquet.read_table(cwd / "rows.parquet").to_pylist()
    return dict(found)


def without_null(value: Any) -> Any:
    """Return a value without the keys that are null, which Parquet makes up."""
    if isinstance(value, dict):
        return {key: without_null(one) for key, one in value.items() if one is not None}
    return [without_null(one) for one in value] if isinstance(value, list) else value


def read(tokenizer: Tokenizer, cwd: Path, row: dict[str, Any], name: str = "rows.jsonl") -> list[Any]:
    """Return the samples that lorad makes of a row, or the tokens of its prompt. Raises SpecError."""
    if name.endswith("jsonl"):
        (cwd / name).write_text(json.dumps(row))
    if "prompt" in row:
        data = Data(max_prompt_tokens=9999)
        return load_data(name, "train", data, tokenizer, 0, cwd).take(0, 1)[0].tokens
    spec = {"algorithm": "sft", "data": {"train": name, "shuffle": False, "max_sample_tokens": 9999}}
    found = load_train(convert(spec), tokenizer, cwd)
    assert isinstance(found, TargetDataset)
    return [
        (e.tokens + t.tokens.tolist(), [0] * len(e.tokens) + t.trained.astype(int).tolist())
        for e in found.take(0, found.size or 0)
        for t in e.targets
    ]


def characters(family: str, sample: Sample) -> tuple[bytes, bytes]:
    """Return a sample as text, and whether each byte of it is trained."""
    pieces = [golden(family).decode([token]).encode() for token in sample[0]]
    marks = b"".join(bytes([on]) * len(piece) for piece, on in zip(pieces, sample[1], strict=False))
    return b"".join(pieces)[: len(marks)], marks


def compared(
    tokenizer: Tokenizer, cwd: Path, family: str, row: dict[str, Any], name: str = "rows.jsonl"
) -> str:
    """Say how a row of a family came out: "same", "refused by …", "cut at the turn" or "DIFFERENT"."""
    expected: list[Any] | None = None
    why = "a turn is not found"
    try:
        expected = prompt_of(row, family) if "prompt" in row else samples_of(row, family)
    except Exception as error:  # whatever a template raises
        why = str(error)
    try:
        found = read(tokenizer, cwd, row, name)
    except SpecError as error:
        return (
            "refused by both"
            if expected is None
            else f"refused by lorad: {error.problem.partition(': ')[2][:60]}"
        )
    if expected is None:
        return f"DIFFERENT: refused by transformers alone: {why[:80]}"
    if found == expected:
        return "same"
    if "messages" in row and len(found) == len(expected):
        texts = [[characters(family, sample) for sample in samples] for samples in (found, expected)]
        if texts[0] == texts[1]:
            return "cut at the turn"
    return "DIFFERENT"


def compare(family: str, rows: int, seed: int, cwd: Path) -> Counter[str]:
    """Compare random rows of a family; returns how they came out. Those that differ are printed."""
    found, rng = Counter[str](), random.Random(f"{seed}/{family}")
    with model(family, cwd) as tokenizer:
        for number in range(rows):
            row = row_of(rng, is_prompt=number % 4 == 0)
            written = of_parquet(row, cwd) if number % 5 == 0 else None
            name = "rows.jsonl" if written is None else "rows.parquet"
            row = row if written is None else without_null(written)
            how = compared(tokenizer, cwd, family, row, name)
            found[how] += 1
            if how.startswith("DIFFERENT"):
                print(how, name, json.dumps(row, ensure_ascii=False))
    return found
