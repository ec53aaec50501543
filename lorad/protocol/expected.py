"""What became of the expectations of a spec: what a driver journals, `lorad show` prints and `--json` has."""

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from lorad.spec.expect import Expectation
from lorad.text import number


class Expected(Struct, frozen=True):
    """An expectation, judged; a record of kind `expect`.

    metric, low, high, source: see `Expectation`.
    step: the step after which it is judged.
    outcome: pending before that step; not reached where the run ended before it.
    value: what was measured there; None where nothing was, which is missed.
    """

    metric: str
    step: int = 0
    low: float | None = None
    high: float | None = None
    source: str = ""
    outcome: Literal["pending", "met", "missed", "not reached"] = "pending"
    value: float | None = None

    @property
    def in_words(self) -> str:
        """Say what was expected and came of it: `eval met 0.540 at 116, expected 0.52 to 0.57 (verl)`."""
        if self.low is None:
            bounds = f"at most {self.high:g}"
        elif self.high is None:
            bounds = f"at least {self.low:g}"
        else:
            bounds = f"{self.low:g} to {self.high:g}"
        came_to = f" {number(self.value)}" if self.value is not None else ""
        came_to = ", not measured" if self.outcome == "missed" and not came_to else came_to
        source = f" ({self.source})" if self.source else ""
        return f"{self.metric} {self.outcome}{came_to} at {self.step}, expected {bounds}{source}"


def judged(
    expectation: Expectation,
    steps: int,
    done: int,
    figures_at: Callable[[int], Mapping[str, float | None]],
    *,
    is_over: bool,
) -> Expected:
    """Judge an expectation by what was measured until now.

    steps: those of the run, of which `done` are done.
    figures_at: what a step and its evaluation came to, by name.
    is_over: nothing more will be measured at the step `done`, nor after it.
    """
    step = steps if expectation.step is None else expectation.step
    low, high, value = expectation.low, expectation.high, None
    outcome: Literal["pending", "met", "missed", "not reached"] = "not reached" if is_over else "pending"
    if done >= step:
        value = figures_at(step).get(expectation.metric)
        if value is not None:
            fits = (low is None or value >= low) and (high is None or value <= high)
            outcome = "met" if fits else "missed"
        elif is_over or done > step:
            outcome = "missed"
    return Expected(expectation.metric, step, low, high, expectation.source, outcome, value)
