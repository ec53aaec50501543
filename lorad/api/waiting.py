"""Wait until a run is over, or until one of its figures fulfils a condition."""

import time
from collections.abc import Callable, Iterator

from lorad.api.connection import DaemonConnection, rest
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
    """Check whether a run has ended or is paused."""
    return RunState(run.state).is_over


def has_failed(run: Run) -> bool:
    """Check whether a run has ended, and not well."""
    return run.state == RunState.ENDED and run.reason not in _GOOD


def where(run: Run) -> str:
    """Say where a run is: `running at step 3 of 10`."""
    state = f"{run.state} ({run.reason})" if run.reason else run.state
    return f"{state} at step {steps_in_words(run, ' of ')}"


def pages(client: Client, run: str, after: int = 0) -> Iterator[Step]:
    """Yield every step after one, however many there are."""
    while page := client.steps(run, after=after, limit=_PAGE):
        yield from page
        after = page[-1].step


def wait(connection: DaemonConnection, name: str, *, until: Until, timeout: float | None) -> RunDetails:
    """Wait, and return the run as it is then.

    Raises RunFailed, NotReached when it ended or paused before `until` was fulfilled, TimedOut, NotFound when
    it is removed meanwhile, and DaemonUnreachable where the daemon is not to be started again.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    figures = _Figures(connection.client, name)
    while True:
        try:
            run = connection.client.show(name)
            if isinstance(until, Condition):
                reached = figures.reach(until, run)
            else:
                reached = until is not None and until(run)
        except DaemonUnreachable as error:
            connection.revive(error)
            continue
        if reached:  # by what the daemon knows now, which may be more than it did then
            return connection.client.show(name) if isinstance(until, Condition) else run
        if has_failed(run):
            hint = f"`lorad logs {name}` shows what it printed, `lorad resume {name}` continues it."
            raise RunFailed(name, run.reason or run.state, run.detail, step=run.step, hint=hint)
        if is_over(run):
            if until is None:
                return run
            hint = f"`lorad resume {name} --steps N`, or run.resume(steps=N), continues it."
            raise NotReached(f"{name} is {where(run)}, and {figures.missed(until)}", hint=hint)
        if deadline is not None and time.monotonic() >= deadline:
            hint = "It continues; wait again, or `run.stop()`."
            raise TimedOut(f"{name} is {where(run)} after {timeout:g} seconds", hint=hint)
        rest(_PERIOD if deadline is None else min(_PERIOD, max(deadline - time.monotonic(), 0.0)))


class _Figures:
    """The figures of a run. Each look asks only for new ones."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._step = 0
        self._evaluated = -1
        self._attempt = 0
        self._last: dict[str, float | None] = {}

    def reach(self, condition: Condition, run: RunDetails) -> bool:
        """Check whether a step or an evaluation since the last look fulfils the condition."""
        if run.attempt != self._attempt:  # it may have gone back
            self._step = 0
            self._evaluated = -1
            self._attempt = run.attempt
        is_reached = False
        for step in pages(self._client, self._name, self._step):
            self._step = step.step
            is_reached |= self._take(condition, {**step.metrics, "step": step.step})
        for evaluation in self._client.evals(self._name):
            if evaluation.step > self._evaluated:
                self._evaluated = evaluation.step
                is_reached |= self._take(condition, evaluation.figures)
        return is_reached

    def _take(self, condition: Condition, figures: dict[str, float | None] | dict[str, float]) -> bool:
        self._last |= figures
        return condition.holds(figures)

    def missed(self, until: Until) -> str:
        """Say why a condition was not fulfilled."""
        if not isinstance(until, Condition):
            return "what was waited for has not happened"
        value = self._last.get(until.metric)
        if value is None:
            measured = ", ".join(sorted(key for key, v in self._last.items() if v is not None)) or "nothing"
            return f"{until.metric} was not measured; it has {measured}"
        return f"{until} was never true: {until.metric} was {value:.4g} in the end"
