"""Wait for a run: until it is over, or until a figure of it is what somebody waits for."""

import time
from collections.abc import Callable, Iterator

from lorad.api.connection import Connection, rest
from lorad.client.client import Client
from lorad.client.conditions import Condition
from lorad.client.words import steps_in_words
from lorad.errors import DaemonUnreachable, NotReached, RunFailed, TimedOut
from lorad.records.measured import Step
from lorad.records.runs import Run, RunDetails
from lorad.states import EndReason, RunState

Until = Condition | Callable[[RunDetails], bool] | None
_GOOD = (EndReason.COMPLETED, EndReason.STOPPED, EndReason.IMPORTED)
_PERIOD = 0.25  # seconds between looks
_PAGE = 10000  # steps of one answer


def is_over(run: Run) -> bool:
    return RunState(run.state).is_over


def has_failed(run: Run) -> bool:
    return run.state == RunState.ENDED and run.reason not in _GOOD


def failure(run: Run) -> RunFailed:
    """Make the error of a run that did not end well."""
    hint = f"`lorad logs {run.name}` shows what it printed, `lorad resume {run.name}` continues it."
    return RunFailed(run.name, run.reason or run.state, run.detail, step=run.step, hint=hint)


def where(run: Run) -> str:
    """Say how a run stands: `running at step 3 of 10`."""
    state = f"{run.state} ({run.reason})" if run.reason else run.state
    return f"{state} at step {steps_in_words(run, ' of ')}"


def pages(client: Client, run: str, after: int = 0) -> Iterator[Step]:
    """Yield every step behind one, however many there are."""
    while page := client.steps(run, after=after, limit=_PAGE):
        yield from page
        after = page[-1].step


def wait(connection: Connection, name: str, *, until: Until, timeout: float | None) -> RunDetails:
    """Return the run as it is when the wait is over.

    Raises RunFailed, NotReached when it ended or paused without what was waited for, TimedOut; NotFound when
    it is removed meanwhile, and DaemonUnreachable where the daemon is not to be started again.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    figures = _Figures(connection.client, name)
    while True:
        try:
            run = connection.client.show(name)
            reached = _is_reached(run, until, figures)
        except DaemonUnreachable as error:
            connection.revive(error)
            continue
        if reached:  # by what the daemon knows now, which may be more than it did then
            return connection.client.show(name) if isinstance(until, Condition) else run
        if has_failed(run):
            raise failure(run)
        if is_over(run):
            if until is None:
                return run
            raise NotReached(f"{name} is {where(run)}, and {figures.missed(until)}", hint=_further(name))
        if deadline is not None and time.monotonic() >= deadline:
            hint = "It continues; wait again, or `run.stop()`."
            raise TimedOut(f"{name} is {where(run)} after {timeout:g} seconds", hint=hint)
        rest(_PERIOD if deadline is None else min(_PERIOD, max(deadline - time.monotonic(), 0.0)))


def _is_reached(run: RunDetails, until: Until, figures: "_Figures") -> bool:
    if isinstance(until, Condition):
        return figures.reach(until, run)
    return until is not None and until(run)


def _further(name: str) -> str:
    return f"`lorad resume {name} --steps N`, or run.resume(steps=N), continues it."


class _Figures:
    """The figures of a run, of which each look asks for the new ones alone."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self._step, self._evaluated, self._attempt = 0, -1, 0
        self._last: dict[str, float | None] = {}

    def reach(self, condition: Condition, run: RunDetails) -> bool:
        """Whether a step or an evaluation since the last look is as the condition says."""
        if run.attempt != self._attempt:  # it may have gone back
            self._step, self._evaluated, self._attempt = 0, -1, run.attempt
        found = False
        for step in pages(self._client, self._name, self._step):
            self._step = step.step
            found |= self._take(condition, {**step.metrics, "step": step.step})
        for one in self._client.evals(self._name):
            if one.step > self._evaluated:
                self._evaluated = one.step
                found |= self._take(condition, one.figures)
        return found

    def _take(self, condition: Condition, figures: dict[str, float | None] | dict[str, float]) -> bool:
        self._last |= figures
        return condition.holds(figures)

    def missed(self, until: Until) -> str:
        """Say what a condition came to instead."""
        if not isinstance(until, Condition):
            return "what was waited for has not happened"
        value = self._last.get(until.metric)
        if value is None:
            measured = ", ".join(sorted(key for key, v in self._last.items() if v is not None)) or "nothing"
            return f"{until.metric} was not measured; it has {measured}"
        return f"{until} was never true: {until.metric} was {value:.4g} in the end"
