"""The samples of a step as groups of one prompt each, fit to be shown; what is searched in them, and their
order.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorad.client import shapes
from lorad.text import printable

HITS = 10_000  # of a search that are kept
_PART = 4096  # characters that are looked at together
ORDERS = ("as drawn", "reward", "advantage", "length")


@dataclass(frozen=True, slots=True)
class Sample:
    """completion: without control characters. tokens: how many. logprob: their mean. version: its number.
    rewards: components of the reward.
    """

    index: int
    completion: str
    reward: float | None
    advantage: float | None
    tokens: int
    logprob: float | None
    finish: str
    error: str
    version: str
    rewards: dict[str, float]


@dataclass
class Group:
    """All samples of one prompt, which has no control characters here either. rank: its place in the step,
    from 0.
    """

    id: str
    rank: int
    prompt: str
    answer: str
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


def grouped(rows: Iterable[shapes.Sample]) -> list[Group]:
    """Group the samples of a step by prompt, in order."""
    groups = dict[str, Group]()
    for row in rows:
        id = row.prompt_id
        if id not in groups:
            groups[id] = Group(id, len(groups), _inert(row.prompt), _inert(row.answer))
        groups[id].samples.append(_sample(row))
    return list(groups.values())


def _sample(row: shapes.Sample) -> Sample:
    return Sample(
        index=row.index,
        completion=_inert(row.completion),
        reward=_finite(row.reward),
        advantage=_finite(row.advantage),
        tokens=len(row.tokens),
        logprob=_mean(row.logprobs),
        finish=_inert(row.finish),
        error=_inert(row.error),
        version=_inert(row.version).rpartition("@")[2][:12],
        rewards={_inert(k): v for k, value in row.rewards.items() if (v := _finite(value)) is not None},
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


def _inert(text: Any) -> str:
    """`printable`, quick where nothing is to be done; a tab is two spaces."""
    whole = "" if text is None else str(text)
    parts = (whole[i : i + _PART] for i in range(0, len(whole), _PART))
    return "".join(part if part.isprintable() else printable(part.replace("\t", "  ")) for part in parts)


def ordered(samples: Sequence[Sample], by: str) -> list[int]:
    """Places of samples, the largest first; those without a value last. by: one of ORDERS."""
    values: dict[str, Callable[[Sample], float | None]] = {
        "reward": lambda one: one.reward,
        "advantage": lambda one: one.advantage,
        "length": lambda one: one.tokens or len(one.completion),
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
    look, found = re.compile(re.escape(_inert(wanted)), re.IGNORECASE), list[Hit]()
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
