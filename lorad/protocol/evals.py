"""Questions and answers of `lorad eval`, the names of its figures, and what became of expected ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lorad.protocol.preflight import ErrorFacts
from lorad.spec.kept import Expectation
from lorad.text import number

LOWER_IS_BETTER = ("nll",)


class SetScore(Struct, frozen=True):
    """The result of one set of held-out problems.

    score: mean reward of all completions that have one (avg@n); None without any.
    problems: how many were tried.
    failed: completions whose reward failed.
    n: completions of each problem.
    passed: by `pass@k`, the estimated share of problems of which one of k completions passes; with n > 1.
    """

    score: float | None
    problems: int
    failed: int
    n: int = 1
    passed: dict[str, float] = {}


def figures(
    score: float | None, nll: float | None, accuracy: float | None, sets: Mapping[str, SetScore]
) -> dict[str, float]:
    """Return what was measured, by name: `eval`, `eval/NAME`, `eval/NAME/pass@4`, nll, accuracy."""
    of_sets: dict[str, float | None] = {}
    for name, scores in sets.items():
        of_sets[f"eval/{name}"] = scores.score
        of_sets |= {f"eval/{name}/{key}": value for key, value in scores.passed.items()}
    measured = {"eval": score, **of_sets, "nll": nll, "accuracy": accuracy}
    return {name: value for name, value in measured.items() if value is not None}


def chosen(best_by: str | None, evals: Sequence[Mapping[str, float]]) -> str | None:
    """Return the metric that evaluations are compared by: `best_by`, else the first that was measured."""
    if best_by is not None:
        return best_by
    scores = [name for one in evals for name in one if "@" not in name and name not in ("nll", "accuracy")]
    first = "eval" if "eval" in scores else next(iter(scores), None)
    return first or next((name for name in ("nll", "accuracy") if any(name in one for one in evals)), None)


def best_first(metric: str, evals: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the places of the evaluations that have the metric, the best first; of equal ones the first."""
    sign = 1.0 if metric in LOWER_IS_BETTER else -1.0
    ranked = [(sign * one[metric], place) for place, one in enumerate(evals) if metric in one]
    return [place for _, place in sorted(ranked)]


def ks(n: int) -> list[int]:
    """Return the k of pass@k that are measured with n completions: powers of two, and n."""
    return [] if n < 2 else sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def pass_at(k: int, counts: Sequence[tuple[int, int]]) -> float | None:
    """Estimate the share of problems of which one of k completions passes (Chen et al., 2021, without bias).

    counts: the scored completions of each problem, and how many passed. Problems with fewer than k are left
        out; None where all are.
    """
    shares = []
    for n, passed in counts:
        if n >= k:
            missed = 1.0
            for i in range(k):
                missed *= max(n - passed - i, 0) / (n - i)
            shares.append(1.0 - missed)
    return sum(shares) / len(shares) if shares else None


def interval(score: float, problems: int, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Return where the mean reward over all problems lies with 95 %, by that of some of them (Wilson).

    Exact for rewards that are `low` or `high`, at least as wide as it should be for those between.
    """
    span = high - low
    z2 = 1.96**2
    share = min(max((score - low) / span, 0.0), 1.0)
    middle = (share + z2 / (2 * problems)) / (1 + z2 / problems)
    half = math.sqrt(z2 * (share * (1 - share) / problems + z2 / (4 * problems**2))) / (1 + z2 / problems)
    return low + span * max(middle - half, 0.0), low + span * min(middle + half, 1.0)


class Expected(Struct, frozen=True):
    """Says what became of an expectation; a record of kind `expect`.

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

    steps: how many steps the run has, of which `done` are done.
    figures_at: what a step and its evaluation came to, by name.
    is_over: nothing more will be measured at the step `done`, nor after it.
    """
    step = steps if expectation.step is None else expectation.step
    low = expectation.low
    high = expectation.high
    value = None
    outcome: Literal["pending", "met", "missed", "not reached"] = "not reached" if is_over else "pending"
    if done >= step:
        value = figures_at(step).get(expectation.metric)
        if value is not None:
            fits = (low is None or value >= low) and (high is None or value <= high)
            outcome = "met" if fits else "missed"
        elif is_over or done > step:
            outcome = "missed"
    return Expected(expectation.metric, step, low, high, expectation.source, outcome, value)


class Suite(Struct, frozen=True):
    """A suite that evaluates.

    task: a name or a YAML file of lm-eval, or a file of inspect-ai.
    python: the interpreter that has the suite.
    """

    kind: Literal["lm_eval", "inspect"]
    task: Annotated[str, Meta(min_length=1)]
    python: str


class Wanted(Struct, frozen=True, kw_only=True, tag=True):
    """A version to evaluate.

    version: an alias, run@number, run@best, or a run's name.
    settings: settings of a set of `eval.sets` as plain data; what is left out is the run's.
    cwd: the directory where relative paths of the settings begin.
    out: a file for the completions, of a suite a directory for what it writes; "" for none.
    suite: it evaluates instead of a reward on rows.
    env: an environment that is played instead of that of the run; "" for that.
    """

    version: str
    settings: dict[str, Any]
    cwd: str
    out: str = ""
    suite: Suite | None = None
    env: str = ""


class Evaluated(Struct, frozen=True, kw_only=True):
    """The result of an evaluation.

    version: run@number.
    settings: the settings that were used, resolved.
    error: why there is nothing.
    """

    version: str = ""
    settings: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    problems: int = 0
    failed: int = 0
    error: ErrorFacts | None = None
