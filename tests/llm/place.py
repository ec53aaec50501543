"""Where SmolLM2-135M-Instruct is, and chats about additions as transformers renders them for it."""

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from lorad.box.models import own_models
from lorad.protocol.batch import Batch

NAME, VARIABLE = "smollm2", "LORAD_SMOLLM2"
EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_NUMBER = re.compile(r"(\d+)\D*$")  # as the example's reward looks for the sum


def smollm2() -> Path | None:
    """Return the directory that LORAD_SMOLLM2 names, or else where `lorad models get smollm2` puts it."""
    named = Path(os.environ.get(VARIABLE) or own_models(Path.home()) / NAME)
    return named if (named / "config.json").exists() else None


@dataclass(frozen=True)
class Addition:
    question: str
    answer: str

    def is_solved_by(self, text: str) -> bool:
        number = LAST_NUMBER.search(text)
        return number is not None and number[1] == self.answer


def additions(split: str, count: int) -> list[Addition]:
    """Return the first additions of `train` or `test`."""
    with (EXAMPLES / "addition" / f"{split}.csv").open() as file:
        rows = list(csv.DictReader(file))[:count]
    return [Addition(f"What is {row['a']} + {row['b']}?", row["answer"]) for row in rows]


@cache
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base, padding_side="left")


def prompt_tokens(base: Path, addition: Addition) -> np.ndarray:
    """Return the chat with an assistant's turn begun, int32 [tokens]."""
    chat = [{"role": "user", "content": addition.question}]
    text = tokenizer(base).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return np.array(tokenizer(base)(text)["input_ids"], np.int32)


def answered(base: Path, of: Sequence[Addition]) -> Batch:
    """Return chats with three answers each: the number, the number in a sentence, a wrong one."""
    groups: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for addition in of:
        texts = [addition.answer, f"{addition.question[8:-1]} = {addition.answer}.", f"It is {len(groups)}."]
        answers = [tokenizer(base)(f"{text}<|im_end|>")["input_ids"] for text in texts]
        groups.append((prompt_tokens(base, addition), [np.array(ids, np.int32) for ids in answers]))
    return Batch.of(groups)
