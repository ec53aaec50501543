"""What the samples tab reads: the samples of one step, of training or of an evaluation, once."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, LoradError
from lorad.records.runs import RunDetails
from lorad.spec.kept import MAIN
from lorad.tui.feed import Changes, Pauses
from lorad.tui.samples.groups import Group, grouped

LIMIT = 10_000  # samples of a step that are asked for


class Step(NamedTuple):
    """The samples of one step.

    Attributes:
        words: Why there are no samples.
        set: The set of an evaluation; "" for training.
        steps: All steps that may have samples, in order.
    """

    number: int
    newest: int
    attempt: int
    groups: list[Group]
    words: str = ""
    set: str = ""
    steps: Sequence[int] = ()

    def beside(self, at: int, by: int) -> int | None:
        """Return the step that is so many before or after another one; None: past the newest."""
        place = bisect_right(self.steps, at) - 1 + by
        return self.steps[max(place, 0)] if place < len(self.steps) else None


def steps_of(client: Client, run: str, set: str = "", newest: int | None = None) -> Sequence[int]:
    """Return the steps that may have samples: all of training, or the steps with evaluations of a set.

    newest: the newest step of the run, if it is known.
    """
    if not set:
        return range(1, (client.show(run).step if newest is None else newest) + 1)
    evals = client.evals(run)
    return [each.step for each in evals if (each.problems if set == MAIN else set in each.sets)]


@dataclass(eq=False)
class StepReading:
    """Reads once for each attempt and step: samples never change."""

    _step: Step | None = None
    _pace: Pauses = field(default_factory=Pauses)

    def read(
        self, client: Client, changes: Changes, run: RunDetails, set: str, step: int | None
    ) -> Step | None:
        """Return what changed. step: the number that is wanted; None: the latest."""
        had = self._step
        is_known = had is not None and (had.attempt, had.set) == (run.attempt, set)
        if had is None or not is_known or not set or changes.touch(run.name, "eval"):
            steps = steps_of(client, run.name, set, run.step)
        else:
            steps = had.steps
        at = -1
        if steps:  # the last step until the one that is wanted
            at = steps[-1] if step is None else steps[max(bisect_right(steps, step) - 1, 0)]
        if had is not None and is_known and had.number == at and (had.groups or not changes.everything):
            is_same = (had.newest, had.steps) == (run.step, steps)
            self._step = had if is_same else had._replace(newest=run.step, steps=steps)
            return None if self._step is had else self._step
        if is_known and step is None and not self._pace.is_due:
            return None
        groups = list[Group]()
        words = f"Step {at} has no samples."
        if at < 0 or (at == 0 and not set):
            none_yet = f"No evaluation of {set} has ended yet." if set else ""
            words = none_yet or "No samples yet: the first step has not ended."
        else:
            try:
                with self._pace.asking():
                    rows = client.samples(run.name, step=at, limit=LIMIT, eval=set or None, brief=True)
                groups = grouped(rows)
            except DaemonUnreachable:
                raise
            except LoradError as error:
                words = error.in_full
        self._step = Step(at, run.step, run.attempt, groups, "" if groups else words, set, steps)
        return self._step
