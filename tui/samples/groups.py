"""The samples of a step as groups of one prompt each, fit to be shown, searched and ordered."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from lorad.client.choice import Choice
from lorad.records import samples
from lorad.text import one_line
from lorad.tui.samples.parts import Part, inert, text_and_parts

HITS = 10_000  # of a search that are kept
ORDERS = ("as drawn", "reward", "advantage", "length")


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample, fit to be shown.

    Attributes:
        completion: The text without control characters; of an episode, all that was said.
        size: How many tokens the model sampled.
        logprob: The mean over the tokens.
        rewards: The components of the reward.
        rows: How many rows of training an episode makes.
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

    Attributes:
        rank: The place of the prompt in the step, from 0.
        problem: The number of the prompt among the problems of an evaluation, from 1.
    """

    id: str
    rank: int
    prompt: str
    answer: str
    problem: int | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]

    @property
    def mean(self) -> float | None:
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def spread(self) -> float | None:
        """Return the standard deviation; a group with 0 teaches nothing."""
        rewards = self.rewards
        mean = self.mean
        if mean is None:
            return None
        return math.sqrt(sum((reward - mean) * (reward - mean) for reward in rewards) / len(rewards))


class Hit(NamedTuple):
    """A place where a search found something, in the sample at a place of the group; -1: in the prompt."""

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
        text, parts = text_and_parts(row)
        logprob = _finite(row.logprob)
        logprobs = [value for value in row.logprobs if value is not None]
        if row.logprob is None and logprobs and len(logprobs) == len(row.logprobs):
            logprob = _finite(sum(logprobs) / len(logprobs))
        sample = Sample(
            index=row.index,
            completion=text,
            reward=_finite(row.reward),
            advantage=_finite(row.advantage),
            size=row.size,
            logprob=logprob,
            ending=one_line(row.ending),
            error=inert(row.error),
            version=inert(row.version).rpartition("@")[2][:12],
            rewards={inert(k): v for k, value in row.rewards.items() if (v := _finite(value)) is not None},
            parts=parts,
            turn_count=row.turn_count,
            rows=row.rows,
            prompt=groups[id].prompt,
        )
        groups[id].samples.append(sample)
    return list(groups.values())


def selected(groups: Iterable[Group], choice: Choice) -> list[Group]:
    """Return the groups with the samples that a choice takes, but no empty ones. Raises SpecError."""
    takes = choice.test()
    left = (replace(group, samples=list(filter(takes, group.samples))) for group in groups)
    return [group for group in left if group.samples]


def _finite(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def ordered(samples: Sequence[Sample], by: str) -> list[int]:
    """Return the places of samples, the largest first and those without a value last. by: one of ORDERS."""
    values: dict[str, Callable[[Sample], float | None]] = {
        "reward": lambda sample: sample.reward,
        "advantage": lambda sample: sample.advantage,
        "length": lambda sample: sample.size or len(sample.completion),
    }
    if by not in values:
        return list(range(len(samples)))
    keyed = [(values[by](sample), place) for place, sample in enumerate(samples)]
    keyed.sort(key=lambda pair: (pair[0] is None, -(pair[0] or 0.0), pair[1]))
    return [place for _, place in keyed]


def hits(groups: Iterable[Group], needle: str, by: str) -> list[Hit]:
    """Return where prompts and completions contain a text, whatever its case, in the order of the screen."""
    look = re.compile(re.escape(inert(needle)), re.IGNORECASE)
    matches = list[Hit]()
    for group in groups if needle else ():
        texts = [(-1, group.prompt), *((i, group.samples[i].completion) for i in ordered(group.samples, by))]
        for place, text in texts:
            places = islice(look.finditer(text), HITS - len(matches))
            matches += [Hit(group.id, place, *match.span()) for match in places]
    return matches
