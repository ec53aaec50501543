"""Differences between two texts, by words or by lines, with Myers' shortest edit script (An O(ND) Difference
Algorithm, 1986). Texts with hardly anything in common count as replaced, so that hostile ones take no longer.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_EDITS = 600  # at most as many words or lines are taken away and put in, before all of it counts as replaced
SAME, GONE, NEW = "=", "-", "+"
_WORD = re.compile(r"\n|[^\S\n]+|\w+|[^\w\s]")

# what became of it, first and end in `before` (of what is gone) or `after` (of the rest)
_Span = tuple[str, int, int]


class Piece(NamedTuple):
    """op: SAME, GONE or NEW."""

    op: str
    text: str


def words(before: str, after: str) -> list[Piece]:
    """Return one text made of both: without what is NEW it is `before`,
    without what is GONE it is `after`.
    """
    return _pieces(_WORD.findall(before), _WORD.findall(after))


def lines(before: str, after: str) -> list[Piece]:
    """The same by lines: each piece is one line, without its end."""
    one, other = before.splitlines(), after.splitlines()
    return [
        Piece(op, line)
        for op, start, end in _spans(one, other)
        for line in (one if op == GONE else other)[start:end]
    ]


def _pieces(one: Sequence[str], other: Sequence[str]) -> list[Piece]:
    return [
        Piece(op, "".join((one if op == GONE else other)[start:end])) for op, start, end in _spans(one, other)
    ]


def _spans(one: Sequence[str], other: Sequence[str]) -> Iterator[_Span]:
    """Yield the spans in order, none empty; in a change, what is gone comes first."""
    a, b = 0, 0
    for x, y, length in _matches(one, other):
        if x > a:
            yield GONE, a, x
        if y > b:
            yield NEW, b, y
        if length:
            yield SAME, y, y + length
        a, b = x + length, y + length


def _matches(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Stretches that both have: (place in one, place in other, length), the last one empty, at the ends."""
    most = min(len(one), len(other))
    head = next((i for i in range(most) if one[i] != other[i]), most)
    tail = next((i for i in range(most - head) if one[-1 - i] != other[-1 - i]), most - head)
    if head:
        yield 0, 0, head
    middle = _common(one[head : len(one) - tail], other[head : len(other) - tail])
    yield from ((head + x, head + y, length) for x, y, length in middle)
    if tail:
        yield len(one) - tail, len(other) - tail, tail
    yield len(one), len(other), 0


def _common(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int, int]]:
    """The stretches of the shortest edit script; none when that is longer than EDITS."""
    furthest, trail = {1: 0}, list[dict[int, int]]()  # by diagonal: how far down `one` so many edits lead
    for edits in range(min(len(one) + len(other), _EDITS) + 1):
        trail.append({k: furthest[k] for k in range(-edits - 1, edits + 2) if k in furthest})
        for k in range(-edits, edits + 1, 2):
            x = _step(furthest, k, edits)
            while x < len(one) and 0 <= x - k < len(other) and one[x] == other[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(one) and x - k >= len(other):
                return _way(trail, len(one), len(other))
    return []


def _step(furthest: dict[int, int], k: int, edits: int) -> int:
    """Return where diagonal k is reached: down from the one above, or across from the one below."""
    down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
    return furthest[k + 1] if down else furthest[k - 1] + 1


def _way(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int, int]]:
    """Back along the trail."""
    found = []
    for edits in range(len(trail) - 1, -1, -1):
        furthest, k = trail[edits], x - y
        begun = _step(furthest, k, edits)
        if x > begun:
            found.append((begun, begun - k, x - begun))
        across = begun - k >= 0 and not (k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1]))
        x, y = (begun - 1, begun - k) if across else (begun, begun - k - 1)
    return found[::-1]
