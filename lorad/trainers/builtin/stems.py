"""What prompts of a micro-batch begin with alike, so that it is computed once: a system prompt, the head of a
chat template, the same first words. Stems may branch: sources of data with system prompts of their own have
the head of the template before these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lorad.trainers.builtin.blocks import Ints

WORTH = 20
"""Stems are made where those of a level leave out a row in so many: attention then has more blocks, and masks
where it needs none otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Stems:
    """n stems of G prompts; each comes after the one that it shares.

    lengths, starts, owner, source: int64 [n]: its tokens, how many are before it, the stem that it continues
    (-1 for none), and the prompt whose tokens it has. of, before: int64 [G]: the stem that each prompt
    continues (-1 for none), and how many of its tokens are in stems. Both are empty without any stem.
    """

    lengths: Ints
    starts: Ints
    owner: Ints
    source: Ints
    of: Ints
    before: Ints

    def __bool__(self) -> bool:
        return bool(self.lengths.size)

    @property
    def left_out(self) -> int:
        """Return how many rows need not be computed."""
        return int(self.before.sum() - self.lengths.sum())


NO_STEMS = Stems(*(np.zeros(0, np.int64) for _ in range(6)))


def stems_of(tokens: Sequence[np.ndarray], rows: int) -> Stems:
    """Return the stems of prompts. The last token of each prompt stays its own, as it predicts.

    tokens: int32 [t] of each. rows: those that would be computed without stems.
    """
    prompts: list[list[int]] = [each.tolist() for each in tokens]
    found: list[tuple[int, int, int, int]] = []
    of, before = [-1] * len(prompts), [0] * len(prompts)
    alike: list[Sequence[int]] = [range(len(prompts))]
    while alike:
        branches = [branch for some in alike for branch in _branches(prompts, some, before[some[0]])]
        lengths = [_common([prompts[index] for index in some], before[some[0]]) for some in branches]
        saved = sum((len(some) - 1) * length for some, length in zip(branches, lengths, strict=True))
        if saved * WORTH < rows:
            break
        rows -= saved
        for some, length in zip(branches, lengths, strict=True):
            first = some[0]
            found.append((length, before[first], of[first], first))
            for index in some:
                of[index], before[index] = len(found) - 1, before[index] + length
        alike = branches
    if not found:
        return NO_STEMS
    sizes, starts, owner, source = np.array(found, np.int64).T
    return Stems(sizes, starts, owner, source, np.array(of, np.int64), np.array(before, np.int64))


def _branches(prompts: Sequence[list[int]], alike: Sequence[int], start: int) -> list[Sequence[int]]:
    """Return which of some prompts have the same token at a place, where several have."""
    found: dict[int, list[int]] = {}
    for index in alike:
        if len(prompts[index]) > start + 1:
            found.setdefault(prompts[index][start], []).append(index)
    return [some for some in found.values() if len(some) > 1]


def _common(prompts: Sequence[list[int]], start: int) -> int:
    """Return how many tokens from a place on all prompts have alike, without the last of any."""
    heads = [prompt[start:-1] for prompt in prompts]
    first, last = min(heads), max(heads)
    apart = (place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1])
    return next(apart, len(first))
