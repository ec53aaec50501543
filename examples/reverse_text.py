"""Texts reversed letter by letter: the reward of `prime-reverse-text.yaml`, and rows for it without the hub.

`python examples/reverse_text.py FILE.jsonl TEXT…` writes a row for each sentence of these files of text. Its
`prompt` is what the dataset on the hub has; its `completion` is the answer, for SFT before the recipe.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path

_TAGS = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
SHORTEST, LONGEST = 16, 120  # letters of a sentence, so that its reversal fits into the recipe's completions


def score(completion: str, answer: str) -> float:
    """Say how alike the first tagged text is to `answer` reversed, from 0 to 1; 0 without the tags.

    It is 2 M / T: T are the letters of both, M those of their matching blocks (Ratcliff and Obershelp, as
    difflib has it), which the environment of verifiers calls a ratio of the longest common subsequence.
    """
    tagged = _TAGS.search(completion)
    text = tagged[1].strip() if tagged else ""
    return SequenceMatcher(None, text, answer[::-1]).ratio()


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each in one line, that are neither short nor long."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if SHORTEST <= len(sentence) <= LONGEST:
                yield sentence


def row(sentence: str) -> dict[str, str]:
    return {"prompt": sentence, "completion": f"<reversed_text>{sentence[::-1]}</reversed_text>"}


def main(rows: str, texts: Sequence[str]) -> None:
    every_one = dict.fromkeys(sentence for file in texts for sentence in sentences(Path(file).read_text()))
    Path(rows).write_text("".join(json.dumps(row(sentence)) + "\n" for sentence in every_one))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
