"""Tokenises beginnings of a text, for the cost of the whole text."""

import re
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from lorad.rl.tokenizer import Tokenizer

_SHORT = 64  # characters of the longest text whose ids are remembered
_MOST = 4096  # texts whose ids are remembered


class Prefixes:
    """Tokenises each beginning only from its last added token on (`<|im_start|>`), before which no tokenizer
    looks.

    Where it has none, from the end of a shorter beginning on, as long as that gives the tokens of the text.
    So a text costs its length, however many of its beginnings are asked for.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        """Begin with nothing known. `Tokenizer.encode` explains `special`."""
        self._tokenizer = tokenizer
        self._special = special
        self._added = {} if special else tokenizer.added
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._is_added = np.zeros(max(self._added.values(), default=0) + 1, np.bool_)
        self._is_added[[*self._added.values()]] = True
        self._ids = dict[str, list[int]]()

    def of(self, text: str, ids: Sequence[int], ends: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Tokenise the beginnings of a text that end at `ends`.

        Returns for each beginning how many of the text's `ids` it begins with, and the ids behind them.
        """
        matches = [*self._pattern.finditer(text)]
        array = np.array(ids, np.int64)
        places = np.flatnonzero(self._is_added[np.minimum(array, len(self._is_added) - 1)])
        places = places[array[places] < len(self._is_added)]
        if array[places].tolist() != [self._added[match[0]] for match in matches]:
            matches = []
            places = places[:0]
        starts = [0, *(match.start() for match in matches)]
        numbers = [0, *places.tolist()]
        behind = [0, *(match.end() for match in matches)]
        beginnings = list[tuple[int, list[int]]]()
        last = 0
        reached = 0
        for end in ends:
            chosen = bisect_right(behind, end) - 1
            first = numbers[chosen]
            more = list[int]()
            if not chosen and last:  # no added token: from the beginning before, unless that changes a token
                first = reached
                more = self._encoded(text[last:end])
            if not more or ids[first : first + len(more)] != more:
                first = numbers[chosen]
                more = self._encoded(text[starts[chosen] : end])
            if ids[first : first + len(more)] == more:
                last = end
                reached = first + len(more)
            beginnings.append((first, more))
        return beginnings

    def _encoded(self, text: str) -> list[int]:
        if len(text) > _SHORT:
            return self._tokenizer.encode(text, special=self._special)
        if (ids := self._ids.get(text)) is None:
            if len(self._ids) >= _MOST:
                self._ids.clear()
            ids = self._ids[text] = self._tokenizer.encode(text, special=self._special)
        return ids


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(first), len(second)))
