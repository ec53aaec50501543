"""Samples of other steps, or of another run, to look at beside those that are shown. Called on threads."""

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, LoradError, NotFound
from lorad.records.samples import Sample
from lorad.tui.samples.groups import Group, grouped
from lorad.tui.samples.look import Look
from lorad.tui.samples.reading import LIMIT, steps_of
from lorad.tui.samples.text import ComparedGroup, Scale, one_by_one, scale, together
from lorad.tui.widgets.text_view import TextSection

_LOOK = 32  # steps to each side that are looked through
_PATIENCE = 5.0  # seconds for that
_REMEMBERED = 4096  # steps whose prompts are remembered


class _Other(NamedTuple):
    """A prompt in another step.

    groups: all groups of that step.
    says: which prompt this is.
    """

    step: int
    group: Group
    groups: list[Group]
    says: str


class PromptFinder:
    """Finds prompts in the steps of one attempt of a run, or of its evaluations of a set.

    is_other: it is another run than the one that is shown, where an id may be the id of another prompt.
    """

    def __init__(self, client: Client, run: str, set: str = "", *, is_other: bool = False) -> None:
        self._client = client
        self._run = run
        self._set = set
        self.other_run = run if is_other else ""
        self._of = f" of {run}" if is_other else ""
        self._prompts = OrderedDict[int, frozenset[str]]()  # by step; empty where there are no samples
        self._last: tuple[int, list[Group]] = (-1, [])

    def at(self, step: int, group: Group) -> _Other:
        """Return the same prompt in a step, else the prompt at the same place. Raises LoradError."""
        groups = self._groups(step)
        of = self._of
        if not groups:
            raise NotFound(f"step {step} of {self._run} has no samples", hint="Choose another step.")
        for other in groups:
            if self._key(other) == self._key(group):
                return _Other(step, other, groups, f"the same prompt in step {step}{of}")
        other = groups[min(group.rank, len(groups) - 1)]
        says = f"this prompt is not in step {step}{of}; its prompt {other.rank + 1} instead"
        return _Other(step, other, groups, says)

    def nearest(self, step: int, group: Group, is_over: Callable[[], bool]) -> _Other:
        """Return the prompt in the nearest earlier step that has it, else in the nearest later one.

        In another run the same step comes first. Where no step nearby has the prompt, it is the prompt at the
        same place of the nearest step. Raises LoradError when no other step has samples.
        """
        steps = list[int]()  # that have samples
        until = time.monotonic() + _PATIENCE
        sampled = steps_of(self._client, self._run, self._set)
        at = min(step, sampled[-1] if sampled else 0) if self.other_run else step
        place = bisect_left(sampled, at)  # so many are before it
        later = sampled[place : place + _LOOK + 1]
        same = [each for each in later[:1] if each == at and self.other_run]
        earlier = reversed(sampled[max(place - _LOOK, 0) : place])
        for other_step in (*same, *earlier, *(each for each in later if each != at)):
            if is_over() or time.monotonic() > until:
                break
            if other_step not in self._prompts:
                try:
                    self._groups(other_step)
                except DaemonUnreachable:
                    raise
                except LoradError:
                    self._remember(other_step, frozenset())
            prompts = self._prompts.get(other_step, frozenset())
            if self._key(group) in prompts:
                return self.at(other_step, group)
            steps += [other_step] if prompts else []
        if not steps:
            hint = "checkpoint.keep_samples says how many do."
            raise NotFound(f"no step near step {step}{self._of} has samples", hint=hint)
        absent = f"this prompt is not in steps {min(steps)} to {max(steps)}{self._of}"
        other = self.at(steps[0], group)
        return other._replace(says=f"{absent}; prompt {other.group.rank + 1} of step {other.step} instead")

    def _key(self, group: Group) -> str:
        return group.prompt if self.other_run else group.id

    def _groups(self, step: int) -> list[Group]:
        if self._last[0] != step:
            rows = self._client.samples(self._run, step=step, limit=LIMIT, eval=self._set or None, brief=True)
            self._last = step, grouped(rows)
            self._remember(step, frozenset(map(self._key, self._last[1])))
        return self._last[1]

    def _remember(self, step: int, prompts: frozenset[str]) -> None:
        self._prompts[step] = prompts
        while len(self._prompts) > _REMEMBERED:
            self._prompts.popitem(last=False)


class ThisPrompt(NamedTuple):
    """The prompt that is compared with another one."""

    step: int
    group: Group
    scale: Scale


class SideBySide(NamedTuple):
    """A prompt beside others.

    says: what the prompt is shown beside.
    options: the options with which `lorad samples` of the other run prints it.
    """

    says: str
    sections: list[TextSection]
    options: str = ""


def compared(
    finder: PromptFinder,
    shown: ThisPrompt,
    step: int | None,
    by: str,
    is_over: Callable[[], bool],
    *,
    word_by_word: bool,
) -> SideBySide:
    """Return both sides, the earlier step of a run first, or another run last. Raises LoradError.

    step: the number of the other step; None: the nearest one with that prompt.
    by: one of ORDERS.
    """
    group = shown.group
    other = finder.nearest(shown.step, group, is_over) if step is None else finder.at(step, group)
    name = f"{finder.other_run} step {other.step}".lstrip()
    sides = [
        ComparedGroup(name, other.group, scale(other.groups)),
        ComparedGroup(f"step {shown.step}", group, shown.scale, is_shown=True),
    ]
    if finder.other_run or other.step > shown.step:
        sides.reverse()
    options = f"--step {other.step} --prompt {other.group.problem or other.group.rank + 1}"
    before, after = sides
    return SideBySide(other.says, together(before, after, by, word_by_word=word_by_word), options)


def history(client: Client, run: str, set: str, shown: ThisPrompt, look: Look) -> SideBySide:
    """Return one held-out problem at each step whose completions are kept. Raises LoradError."""
    rows = client.samples(run, eval=set, problem=shown.group.problem, limit=LIMIT, brief=True)
    steps = OrderedDict[int, list[Sample]]()
    for row in rows:
        steps.setdefault(row.step, []).append(row)
    by_step = {step: grouped(samples) for step, samples in steps.items()}
    measure = scale([group for groups in by_step.values() for group in groups])
    sides = [
        ComparedGroup(f"step {step}", groups[0], measure, is_shown=step == shown.step)
        for step, groups in by_step.items()
    ]
    return SideBySide("its other steps", one_by_one(sides, look))
