"""Samples of other steps of a run, to look at beside those that are shown. Called on threads."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, LoradError, NotFound
from lorad.tui.samples.groups import Group, grouped
from lorad.tui.samples.text import Scale, Side, scale, together
from lorad.tui.widgets.text_view import Section

LIMIT = 10_000  # samples of a step that are asked for
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


class Lookup:
    """Find prompts in other steps of one attempt; after a resume a step may have other samples."""

    def __init__(self, client: Client, run: str) -> None:
        self._client, self._run = client, run
        # by step; empty where there are no samples
        self._prompts: OrderedDict[int, frozenset[str]] = OrderedDict()
        self._last: tuple[int, list[Group]] = (0, [])

    def at(self, step: int, group: Group) -> _Other:
        """The same prompt in a step, else the prompt at the same place. Raises LoradError."""
        groups = self._groups(step)
        if not groups:
            raise NotFound(f"step {step} of {self._run} has no samples", hint="Choose another step.")
        for one in groups:
            if one.id == group.id:
                return _Other(step, one, groups, f"the same prompt in step {step}")
        one = groups[min(group.rank, len(groups) - 1)]
        return _Other(
            step, one, groups, f"this prompt is not in step {step}; its prompt {one.rank + 1} instead"
        )

    def nearest(self, step: int, newest: int, group: Group, is_over: Callable[[], bool]) -> _Other:
        """The nearest earlier step with that prompt, else the nearest later one; where no step nearby has it,
        the prompt at the same place of the nearest one. Raises LoradError when no other step has samples."""
        there, until = list[int](), time.monotonic() + _PATIENCE
        for one in _nearby(step, newest):
            if is_over() or time.monotonic() > until:
                break
            prompts = self._ids(one)
            if group.id in prompts:
                return self.at(one, group)
            there += [one] if prompts else []
        if not there:
            raise NotFound(
                f"no step near step {step} has samples", hint="checkpoint.keep_samples says how many do."
            )
        absent = f"this prompt is not in steps {min(there)} to {max(there)}"
        other = self.at(there[0], group)
        return other._replace(says=f"{absent}; prompt {other.group.rank + 1} of step {other.step} instead")

    def _ids(self, step: int) -> frozenset[str]:
        if step not in self._prompts:
            try:
                self._groups(step)
            except DaemonUnreachable:
                raise
            except LoradError:
                self._know(step, frozenset())
        return self._prompts.get(step, frozenset())

    def _groups(self, step: int) -> list[Group]:
        if self._last[0] != step:
            groups = grouped(self._client.samples(self._run, step=step, limit=LIMIT))
            self._last = step, groups
            self._know(step, frozenset(group.id for group in groups))
        return self._last[1]

    def _know(self, step: int, prompts: frozenset[str]) -> None:
        self._prompts[step] = prompts
        while len(self._prompts) > _KNOWN:
            self._prompts.popitem(last=False)


def _nearby(step: int, newest: int) -> Iterator[int]:
    """Earlier steps, the nearest first, then later ones."""
    yield from range(step - 1, max(step - 1 - _LOOK, 0), -1)
    yield from range(step + 1, min(step + _LOOK, newest) + 1)


class Here(NamedTuple):
    """The prompt that another step is compared with. newest: the run's last step."""

    step: int
    newest: int
    group: Group
    scale: Scale


class Ask(NamedTuple):
    """step: which one; None: the nearest one with that prompt. by: one of ORDERS."""

    step: int | None
    by: str
    word_by_word: bool


def compared(lookup: Lookup, here: Here, ask: Ask, is_over: Callable[[], bool]) -> tuple[str, list[Section]]:
    """Return what the prompt was compared with, and both sides, the earlier step first. Raises LoradError."""
    if ask.step is None:
        other = lookup.nearest(here.step, here.newest, here.group, is_over)
    else:
        other = lookup.at(ask.step, here.group)
    sides = [Side(other.step, other.group, scale(other.groups)), Side(here.step, here.group, here.scale)]
    sides.sort(key=lambda side: side.step)
    return other.says, together(sides[0], sides[1], ask.by, here.step, word_by_word=ask.word_by_word)
