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
_KNOWN = 4096  # steps whose prompts are remembered


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
    """Find prompts in the steps of one attempt of a run, or of its evaluations of a set; after a resume a
    step may have other samples.

    is_other: it is another run than the one that is shown, where an id may be the id of another prompt.
    """

    def __init__(self, client: Client, run: str, set: str = "", *, is_other: bool = False) -> None:
        self._client = client
        self._run = run
        self._set = set
        self._is_other = is_other
        # by step; empty where there are no samples
        self._prompts: OrderedDict[int, frozenset[str]] = OrderedDict()
        self._last: tuple[int, list[Group]] = (-1, [])

    def at(self, step: int, group: Group) -> _Other:
        """Return the same prompt in a step, else the prompt at the same place. Raises LoradError."""
        groups = self._groups(step)
        of = f" of {self._run}" if self._is_other else ""
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
        at = min(step, sampled[-1] if sampled else 0) if self._is_other else step
        place = bisect_left(sampled, at)  # so many are before it
        later = sampled[place : place + _LOOK + 1]
        same = [each for each in later[:1] if each == at and self._is_other]
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
                    self._know(other_step, frozenset())
            prompts = self._prompts.get(other_step, frozenset())
            if self._key(group) in prompts:
                return self.at(other_step, group)
            steps += [other_step] if prompts else []
        of = f" of {self._run}" if self._is_other else ""
        if not steps:
            raise NotFound(
                f"no step near step {step}{of} has samples", hint="checkpoint.keep_samples says how many do."
            )
        absent = f"this prompt is not in steps {min(steps)} to {max(steps)}{of}"
        other = self.at(steps[0], group)
        return other._replace(says=f"{absent}; prompt {other.group.rank + 1} of step {other.step} instead")

    def _key(self, group: Group) -> str:
        return group.prompt if self._is_other else group.id

    def _groups(self, step: int) -> list[Group]:
        if self._last[0] != step:
            rows = self._client.samples(self._run, step=step, limit=LIMIT, eval=self._set or None, brief=True)
            self._last = step, grouped(rows)
            self._know(step, frozenset(map(self._key, self._last[1])))
        return self._last[1]

    def _know(self, step: int, prompts: frozenset[str]) -> None:
        self._prompts[step] = prompts
        while len(self._prompts) > _KNOWN:
            self._prompts.popitem(last=False)


class ThisPrompt(NamedTuple):
    """The prompt that is compared with another one."""

    step: int
    group: Group
    scale: Scale


class Wish(NamedTuple):
    """What a prompt is to be compared with.

    step: the number of the other step; None: the nearest one with that prompt.
    run: the name of another run; "": the same one.
    by: one of ORDERS.
    """

    step: int | None
    run: str
    by: str
    word_by_word: bool


class SideBySide(NamedTuple):
    """A prompt beside others.

    says: what the prompt is shown beside.
    options: the options with which `lorad samples` of the other run prints it.
    """

    says: str
    sections: list[TextSection]
    options: str = ""


def compared(lookup: PromptFinder, shown: ThisPrompt, ask: Wish, is_over: Callable[[], bool]) -> SideBySide:
    """Return both sides, the earlier step of a run first, or another run last. Raises LoradError."""
    if ask.step is None:
        other = lookup.nearest(shown.step, shown.group, is_over)
    else:
        other = lookup.at(ask.step, shown.group)
    sides = [
        ComparedGroup(f"{ask.run} step {other.step}".lstrip(), other.group, scale(other.groups)),
        ComparedGroup(f"step {shown.step}", shown.group, shown.scale, is_here=True),
    ]
    if ask.run or other.step > shown.step:
        sides.reverse()
    options = f"--step {other.step} --prompt {other.group.problem or other.group.rank + 1}"
    return SideBySide(
        other.says, together(sides[0], sides[1], ask.by, word_by_word=ask.word_by_word), options
    )


def history(client: Client, run: str, set: str, shown: ThisPrompt, look: Look) -> SideBySide:
    """Return one held-out problem at each step whose completions are kept. Raises LoradError."""
    rows = client.samples(run, eval=set, problem=shown.group.problem, limit=LIMIT, brief=True)
    steps = OrderedDict[int, list[Sample]]()
    for row in rows:
        steps.setdefault(row.step, []).append(row)
    by_step = {step: grouped(samples) for step, samples in steps.items()}
    measure = scale([group for groups in by_step.values() for group in groups])
    sides = [
        ComparedGroup(f"step {step}", groups[0], measure, is_here=step == shown.step)
        for step, groups in by_step.items()
    ]
    return SideBySide("its other steps", one_by_one(sides, look))
