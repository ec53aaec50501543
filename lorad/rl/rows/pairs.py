"""Doubts about preferences that teach nothing, or the opposite of what is meant."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lorad.errors import SpecError
from lorad.rl.rows.columns import find_value, text_of
from lorad.rl.rows.doubts import listed
from lorad.rl.sources import Row
from lorad.spec.data import Data

_SHOWN = 40  # characters of a completion
_LEAST = 10  # characters of a prompt that no completion begins with by chance
_SIDES = ("chosen_key", "rejected_key")
_SCORES = (  # of UltraFeedback and other data
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)
_EQUAL = "chosen and rejected are the same tokens, so that neither is preferred"
_CUT = "chosen and rejected are the same tokens up to data.max_sample_tokens, so that neither is preferred"
_OTHERWISE = "a row before it prefers the opposite; leave one of them out"
_SCORED = "its scores prefer the rejected one; see whether data.chosen_key and data.rejected_key are swapped"
_PROMPT = "the prompt stands there a second time; leave it out of the completion"
_EMPTY = "that completion says nothing; leave the row out"


class Judgement(NamedTuple):
    """A row of preferences as it is trained.

    row: The row itself.
    prompt: The tokens of its prompt, int32.
    completions: The tokens of the chosen and of the rejected completion, or of a single one, int32 each.
    label: Whether a single completion is desired; None for a pair.
    """

    row: Row
    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: bool | None = None


def preference_doubts(key: str, judgements: Iterable[Judgement], data: Data) -> list[str]:
    """Return warnings about preferences. Raises SpecError where no pair has two sides.

    Each begins with the key of the spec that names the rows, and says which rows it is about.
    """
    doubtful: dict[str, dict[tuple[str, int], str]] = {}
    seen = set[tuple[int, ...]]()
    labels = set[bool | None]()
    rows = set[tuple[str, int]]()
    for judgement in judgements:
        place = judgement.row.source, judgement.row.number
        labels.add(judgement.label)
        rows.add(place)
        for sentence, words in (*_of_tokens(judgement, seen, data), *_of_columns(judgement, data)):
            doubtful.setdefault(sentence, {})[place] = words
    alike = [sentence for sentence in (_EQUAL, _CUT) if sentence in doubtful]
    if alike and sum(len(doubtful[sentence]) for sentence in alike) == len(rows):
        keys = f"data.chosen_key is {data.chosen_key} and data.rejected_key {data.rejected_key}"
        hint = "Raise it." if alike == [_CUT] else f"See whether that is in the data: {keys}."
        raise SpecError(f"in each row {alike[0]}", key=key, hint=hint)
    warnings = [f"{key}: {listed(words)}: {sentence}" for sentence, words in doubtful.items()]
    if len(rows) > 1 and len(labels) == 1 and None not in labels:
        label = str(labels.pop()).lower()
        warnings.append(
            f"{key}: each {data.label_key} is {label}, so that no completion is told from another"
        )
    return warnings


def _of_tokens(judgement: Judgement, seen: set[tuple[int, ...]], data: Data) -> Iterator[tuple[str, str]]:
    """Yield sentences about the tokens of a row and the preferences `seen` before it, and words for each."""
    prompt, *sides = (hash(tokens.tobytes()) for tokens in (judgement.prompt, *judgement.completions))
    label = judgement.label
    size = judgement.completions[0].size
    side = "completion_key" if len(sides) == 1 else "chosen_key"
    text = " ".join(_last_text(find_value(judgement.row, data, side)).split())
    shown = f"“{text}”" if len(text) <= _SHOWN else f"“{text[:_SHOWN]}…”"
    if len(sides) == 2 and sides[0] == sides[1]:
        is_full = judgement.prompt.size + size >= data.max_sample_tokens
        yield _CUT if is_full else _EQUAL, shown
        return
    mine = (prompt, *sides) if label is None else (prompt, *sides, label)
    opposite = (prompt, *reversed(sides)) if label is None else (prompt, *sides, not label)
    if opposite in seen:
        yield _OTHERWISE, shown
    seen.add(mine)


def _of_columns(judgement: Judgement, data: Data) -> Iterator[tuple[str, str]]:
    """Yield sentences that are true of the columns of a row, and words for each."""
    values = judgement.row.values
    for better, worse in _SCORES if judgement.label is None else ():
        high = values.get(better)
        low = values.get(worse)
        if isinstance(high, int | float) and isinstance(low, int | float) and high < low:
            yield _SCORED, f"{better} {high:g}, {worse} {low:g}"
    prompt = None if data.prompt_format else find_value(judgement.row, data, "prompt_key")
    for side in _SIDES if judgement.label is None else ("completion_key",):
        text = _last_text(find_value(judgement.row, data, side))
        if not text.strip():
            yield _EMPTY, getattr(data, side)
        if isinstance(prompt, str) and len(prompt) >= _LEAST and text.startswith(prompt):
            yield _PROMPT, getattr(data, side)


def _last_text(value: Any) -> str:
    """Return a completion as text, the last message where it is several."""
    last = value[-1] if isinstance(value, list) and value else value
    if not isinstance(last, dict):
        return text_of(last)
    calls = [key for key in last if key not in ("role", "from", "content", "value", "name")]
    content = last.get("content", last.get("value"))
    return text_of(content or [last[key] for key in calls if last[key]] or "")
