"""Doubts about answers with which no completion can agree, where a builtin reward compares them."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from lorad.rl.data import CHUNK
from lorad.rl.reward import compares, number_in
from lorad.rl.rows.columns import find_value, text_of
from lorad.rl.rows.doubts import listed
from lorad.rl.sources import Row
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.reward import RewardSpec

_SHOWN = 40  # characters of an answer
_SENTENCES = {
    "empty": "{reward} compares completions with it; leave the row out",
    "missing": "{reward} compares completions with it, which is how data frames write what is missing; leave "
    "the row out",
    "number": "gsm8k reads no number in it, so that no completion is right; end it with #### and a number",
    "json": "{reward} wants it as JSON in a completion; make it a text, or score with a function of yours",
    "special": "{reward} is given text without special tokens, so that no completion is right; leave them "
    "out of the answer",
    "stop": "{reward} is given text up to what rollout.stop ends it with, so that no completion is right; "
    "leave that out of the answer, or name another stop",
    "long": "{reward} wants more tokens of a completion than its limit {most}; raise rollout.max_new_tokens",
}


class Sampling(NamedTuple):
    """How completions end: after so many tokens, and at these texts."""

    most: int
    stop: list[str]


def answer_doubts(
    key: str,
    rows: Iterable[Row],
    data: Data,
    rewards: Iterable[RewardSpec],
    sampling: Sampling,
    tokenizer: Tokenizer,
) -> list[str]:
    """Return warnings about answers with which no completion can agree, and the rows of `key` with them."""
    names = [reward.name for reward in rewards if compares(reward.name, reward.pattern)]
    doubtful: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    rows = iter(rows) if names else iter(())
    while chunk := [*islice(rows, CHUNK)]:
        for name in names:
            for row, kind, words in _doubts(name, chunk, data, sampling, tokenizer):
                doubtful.setdefault((name, kind), {})[row.source, row.number] = words
    return [
        f"{key}: {listed(words)}: {_SENTENCES[kind].format(reward=name, most=sampling.most)}"
        for (name, kind), words in doubtful.items()
    ]


def _doubts(
    name: str, rows: Iterable[Row], data: Data, sampling: Sampling, tokenizer: Tokenizer
) -> Iterator[tuple[Row, str, str]]:
    """Look at each answer. Yields the row, which sentence is true of it, and words about the answer."""
    special = re.compile("|".join(map(re.escape, tokenizer.special.values())) or r"(?!)")
    stops = re.compile("|".join(map(re.escape, sampling.stop)) or r"(?!)")
    long: list[tuple[Row, str]] = []
    for row in rows:
        if (answer := find_value(row, data, "answer_key")) is None:
            continue
        text = text_of(answer).strip()
        shown = f"“{text}”" if len(text) <= _SHOWN else f"“{text[:_SHOWN]}…”"
        needed = "####" if name == "gsm8k" else text
        if not text:
            yield row, "empty", "an empty answer"
        elif answer != answer:
            yield row, "missing", text
        elif name == "gsm8k" and number_in(text.rpartition("####")[2]) is None:
            yield row, "number", shown
        elif name != "gsm8k" and isinstance(answer, list | dict):
            yield row, "json", shown
        elif match := special.search(needed):
            yield row, "special", match[0]
        elif match := stops.search(needed):
            yield row, "stop", f"“{match[0]}”"
        elif len(needed.encode()) >= sampling.most:  # a token is a byte at least
            long.append((row, needed))
    ends = name == "exact_match"  # with a token of its own
    for (row, _), tokens in zip(long, tokenizer.encode_batch([text for _, text in long]), strict=True):
        if len(tokens) + ends > sampling.most:
            yield row, "long", f"{len(tokens)} tokens"
