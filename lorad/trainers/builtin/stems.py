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
    """The n stems of G prompts; each comes after the one that it shares.

    Attributes:
        lengths: The tokens of each stem, int64 [n].
        starts: How many tokens are before it, int64 [n].
        owner: The stem that it continues, -1 for none, int64 [n].
        source: A prompt that begins with it, int64 [n].
        of: The stem that each prompt continues, -1 for none, int64 [G]; empty without any stem.
        before: How many tokens of each prompt are in stems, int64 [G]; empty without any stem.
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

    Args:
        tokens: The tokens of each prompt, int32 [t].
        rows: How many rows would be computed without stems.
    """
    prompts: list[list[int]] = [each.tolist() for each in tokens]
    stems: list[tuple[int, int, int, int]] = []
    of = [-1] * len(prompts)
    before = [0] * len(prompts)
    alike: list[Sequence[int]] = [range(len(prompts))]
    while alike:
        branches: list[Sequence[int]] = []  # of each group, prompts with the same next token
        for group in alike:
            start = before[group[0]]
            by_token: dict[int, list[int]] = {}
            for index in group:
                if len(prompts[index]) > start + 1:
                    by_token.setdefault(prompts[index][start], []).append(index)
            branches += [indices for indices in by_token.values() if len(indices) > 1]
        lengths = []  # for each branch, the tokens that all its prompts have alike, without the last of any
        for group in branches:
            heads = [prompts[index][before[group[0]] : -1] for index in group]
            first_head = min(heads)
            pairs = enumerate(zip(first_head, max(heads), strict=False))
            lengths.append(next((place for place, (a, b) in pairs if a != b), len(first_head)))
        saved = sum((len(group) - 1) * length for group, length in zip(branches, lengths, strict=True))
        if saved * WORTH < rows:
            break
        rows -= saved
        for group, length in zip(branches, lengths, strict=True):
            first = group[0]
            stems.append((length, before[first], of[first], first))
            for index in group:
                of[index] = len(stems) - 1
                before[index] += length
        alike = branches
    if not stems:
        return NO_STEMS
    sizes, starts, owner, source = np.array(stems, np.int64).T
    return Stems(sizes, starts, owner, source, np.array(of, np.int64), np.array(before, np.int64))
