"""The samples of a step as groups of one prompt each, fit to be shown; what is searched in them, and their
order.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lorad.client.choice import Choice
from lorad.records import samples
from lorad.text import one_line
from lorad.tui.samples.parts import Part, inert, told

HITS = 10_000  # of a search that are kept
ORDERS = ("as drawn", "reward", "advantage", "length")


@dataclass(frozen=True, slots=True)
class Sample:
    """completion: without control characters; of an episode all that was said. parts: what it is made of.
    size: tokens that the model sampled. logprob: their mean. version: its number. rewards: components of the
    reward. rows: of an episode, in which it is trained. prompt: that of its group.
    """

    index: int
    completion: str
    reward: float | None
    advantage: float | None
    size: int
    logprob: float | None
    ending: str
    error: str
    version: str
    rewards: dict[str, float]
    parts: tuple[Part, ...]
    turn_count: int
    rows: int
    prompt: str

    @property
    def searched(self) -> tuple[str, str]:
        return self.prompt, self.completion


@dataclass
class Group:
    """All samples of one prompt, which has no control characters here either.
    rank: its place in the step, from 0. problem: its number among those of an evaluation, from 1.
    """

    id: str
    rank: int
    prompt: str
    answer: str
    problem: int | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [one.reward for one in self.samples if one.reward is not None]

    @property
    def mean(self) -> float | None:
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def spread(self) -> float | None:
        """Standard deviation; 0 is a group that teaches nothing."""
        rewards, mean = self.rewards, self.mean
        return (
            None
            if mean is None
            else math.sqrt(sum((one - mean) * (one - mean) for one in rewards) / len(rewards))
        )


class Hit(NamedTuple):
    """A place where a search found something. sample: its place in the group as drawn; -1: in the prompt."""

    group: str
    sample: int
    start: int
    end: int


def grouped(rows: Iterable[samples.Sample]) -> list[Group]:
    """Group the samples of a step by prompt, in order."""
    groups = dict[str, Group]()
    for row in rows:
        id = row.prompt_id
        if id not in groups:
            groups[id] = Group(id, len(groups), inert(row.prompt), inert(row.answer), row.problem)
        groups[id].samples.append(_sample(row, groups[id].prompt))
    return list(groups.values())


def selected(groups: Iterable[Group], choice: Choice) -> list[Group]:
    """Return the groups with those of their samples that are wanted; none that is empty. Raises SpecError."""
    takes = choice.test()
    some = (replace(group, samples=list(filter(takes, group.samples))) for group in groups)
    return [group for group in some if group.samples]


def _sample(row: samples.Sample, prompt: str) -> Sample:
    text, parts = told(row)
    return Sample(
        index=row.index,
        completion=text,
        reward=_finite(row.reward),
        advantage=_finite(row.advantage),
        size=row.size,
        logprob=_mean(row.logprobs) if row.logprob is None else _finite(row.logprob),
        ending=one_line(row.ending),
        error=inert(row.error),
        version=inert(row.version).rpartition("@")[2][:12],
        rewards={inert(k): v for k, value in row.rewards.items() if (v := _finite(value)) is not None},
        parts=parts,
        turn_count=row.turn_count,
        rows=row.rows,
        prompt=prompt,
    )


def _finite(value: Any) -> float | None:
    """Return the value, or None if it is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _finite(sum(known) / len(known)) if known and len(known) == len(values) else None


def ordered(samples: Sequence[Sample], by: str) -> list[int]:
    """Places of samples, the largest first; those without a value last. by: one of ORDERS."""
    values: dict[str, Callable[[Sample], float | None]] = {
        "reward": lambda one: one.reward,
        "advantage": lambda one: one.advantage,
        "length": lambda one: one.size or len(one.completion),
    }
    if by not in values:
        return list(range(len(samples)))
    found = [(values[by](one), place) for place, one in enumerate(samples)]
    return [
        place for value, place in sorted(found, key=lambda one: (one[0] is None, -(one[0] or 0.0), one[1]))
    ]


def hits(groups: Iterable[Group], wanted: str, by: str) -> list[Hit]:
    """Return where prompts and completions contain the text, ignoring case, in the order in which they are
    shown.
    """
    if not wanted:
        return []
    look, found = re.compile(re.escape(inert(wanted)), re.IGNORECASE), list[Hit]()
    for hit in _looked(look, groups, by):
        found.append(hit)
        if len(found) == HITS:
            break
    return found


def _looked(look: re.Pattern[str], groups: Iterable[Group], by: str) -> Iterator[Hit]:
    for group in groups:
        texts = [(-1, group.prompt), *((i, group.samples[i].completion) for i in ordered(group.samples, by))]
        for place, text in texts:
            yield from (Hit(group.id, place, match.start(), match.end()) for match in look.finditer(text))
