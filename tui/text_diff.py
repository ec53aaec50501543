"""Differences between two texts by words, with Myers' shortest edit script (An O(ND) Difference Algorithm,
1986). Texts with hardly anything in common count as replaced, so that hostile ones take no longer.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_EDITS = 600  # at most as many words are taken away and put in, before all of it counts as replaced
SAME = "="
GONE = "-"
NEW = "+"
_WORD = re.compile(r"\n|[^\S\n]+|\w+|[^\w\s]")

# what became of it, first and end in `before` (of what is gone) or `after` (of the rest)
_Span = tuple[str, int, int]


class _Passage(NamedTuple):
    """A part of a text, and what became of it: `op` is SAME, GONE or NEW."""

    op: str
    text: str


def words(before: str, after: str) -> list[_Passage]:
    """Return both as one text: without what is NEW it is `before`, without what is GONE `after`."""
    old = _WORD.findall(before)
    new = _WORD.findall(after)
    return [
        _Passage(op, "".join((old if op == GONE else new)[start:end])) for op, start, end in _spans(old, new)
    ]


def _spans(old: Sequence[str], new: Sequence[str]) -> Iterator[_Span]:
    """Yield the spans in order, none empty; in a change, what is gone comes first."""
    most = min(len(old), len(new))
    head = next((i for i in range(most) if old[i] != new[i]), most)
    tail = next((i for i in range(most - head) if old[-1 - i] != new[-1 - i]), most - head)
    middle = _common(old[head : len(old) - tail], new[head : len(new) - tail])
    matches = [(0, 0, head), *((head + x, head + y, length) for x, y, length in middle)]
    a = b = 0
    for x, y, length in (*matches, (len(old) - tail, len(new) - tail, tail)):
        if x > a:
            yield GONE, a, x
        if y > b:
            yield NEW, b, y
        if length:
            yield SAME, y, y + length
        a = x + length
        b = y + length


def _common(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return the stretches of the shortest edit script; none when that is longer than _EDITS."""
    furthest = {1: 0}  # by diagonal, how far down `old` so many edits lead
    trail = list[dict[int, int]]()
    for edits in range(min(len(old) + len(new), _EDITS) + 1):
        trail.append({k: furthest[k] for k in range(-edits - 1, edits + 2) if k in furthest})
        for k in range(-edits, edits + 1, 2):
            x = _step(furthest, k, edits)
            while x < len(old) and 0 <= x - k < len(new) and old[x] == new[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(old) and x - k >= len(new):
                return _way(trail, len(old), len(new))
    return []


def _step(furthest: dict[int, int], k: int, edits: int) -> int:
    """Return where diagonal k is reached: down from the one above, or across from the one below."""
    down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
    return furthest[k + 1] if down else furthest[k - 1] + 1


def _way(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int, int]]:
    """Return the stretches on the way back along the trail."""
    stretches = []
    for edits in range(len(trail) - 1, -1, -1):
        furthest = trail[edits]
        k = x - y
        begun = _step(furthest, k, edits)
        if x > begun:
            stretches.append((begun, begun - k, x - begun))
        across = begun - k >= 0 and not (k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1]))
        x, y = (begun - 1, begun - k) if across else (begun, begun - k - 1)
    return stretches[::-1]
