"""The data behind the curves: series by metric, smoothed or logarithmic, and the window that is shown.

Memory is bounded for any number of steps: every n-th step of a long run is kept, and more of them in a window
(`Track.detail`).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lorad.records.measured import Step

KEPT = 8192  # at most as many points of a metric
FINE = 2048  # and as many of a window
FACTS = ("version", "attempt", "at")  # of a step besides its metrics
AXES = ("step", "tokens", "time")
"""What x can be: steps, tokens sampled until then, milliseconds since the run's first step began."""


@dataclass(eq=False)
class _View:
    """Points of a series, smoothed by an exponential moving average as in TensorBoard, begun without bias.

    With `log` it has log10 of what is above zero; the x of the rest stand in `left`.
    """

    _weight: float
    _log: bool
    xs: array[int] = field(default_factory=lambda: array("q"))
    ys: array[float] = field(default_factory=lambda: array("d"))
    left: array[int] = field(default_factory=lambda: array("q"))
    _seen: int = 0
    _sum: float = 0.0
    _share: float = 0.0

    def follow(self, xs: array[int], ys: array[float]) -> None:
        """Take what is new at the end."""
        weight = self._weight
        for i in range(self._seen, len(xs)):
            self._sum = weight * self._sum + (1.0 - weight) * ys[i]
            self._share = weight * self._share + (1.0 - weight)
            value = self._sum / self._share
            if not self._log:
                self.xs.append(xs[i])
                self.ys.append(value)
            elif ys[i] > 0.0 and value > 0.0:
                self.xs.append(xs[i])
                self.ys.append(math.log10(value))
            else:
                self.left.append(xs[i])
        self._seen = len(xs)


@dataclass(eq=False)
class Series:
    """Points in order of x. What is not a finite number is left out, its x stands in `bad`."""

    xs: array[int] = field(default_factory=lambda: array("q"))
    ys: array[float] = field(default_factory=lambda: array("d"))
    bad: array[int] = field(default_factory=lambda: array("q"))
    left: array[int] = field(default_factory=lambda: array("q"))
    _views: dict[tuple[float, bool], _View] = field(default_factory=dict)

    def add(self, x: int, y: Any) -> None:
        if isinstance(y, int | float) and math.isfinite(y):
            self.xs.append(x)
            self.ys.append(float(y))
        else:
            self.bad.append(x)

    def extend(self, later: Series) -> None:
        self.xs.extend(later.xs)
        self.ys.extend(later.ys)
        self.bad.extend(later.bad)

    def view(self, weight: float, log: bool) -> Series | _View:
        """Return the series as it is drawn, up to date."""
        if not weight and not log:
            return self
        view = self._views.setdefault((weight, log), _View(weight, log))
        view.follow(self.xs, self.ys)
        return view

    def at(self, x: int, within: int = 0) -> float | None:
        """Return the value of x, NaN if that is no number, or of the nearest x at most `within` away."""
        i = bisect_left(self.xs, x)
        j = bisect_left(self.bad, x)
        if i < len(self.xs) and self.xs[i] == x:
            return self.ys[i]
        if j < len(self.bad) and self.bad[j] == x:
            return math.nan
        near = min(
            range(max(i - 1, 0), min(i + 1, len(self.xs))), key=lambda j: abs(self.xs[j] - x), default=None
        )
        return None if near is None or abs(self.xs[near] - x) > within else self.ys[near]

    def keep(self, every: int) -> None:
        """Keep only the points whose x is a multiple of `every`."""
        kept = [i for i, x in enumerate(self.xs) if x % every == 0]
        self.xs = array("q", (self.xs[i] for i in kept))
        self.ys = array("d", (self.ys[i] for i in kept))
        self.bad = array("q", (x for x in self.bad if x % every == 0))
        self._views.clear()


@dataclass(eq=False)
class Track:
    """A run: a series for each metric, of every `every`-th step and the last one; and a window in detail."""

    every: int = 1
    steps: array[int] = field(default_factory=lambda: array("q"))
    series: dict[str, Series] = field(default_factory=dict)
    sets: dict[str, Series] = field(default_factory=dict)  # of evaluations, `eval` first
    detail: Detail | None = None
    parent: Track | None = None  # where this is the detail of another track
    _placed: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, steps: Iterable[Step]) -> None:
        """Take steps as the client gives them, which come after the ones of this track."""
        for step in steps:
            number = step.step
            self.steps.append(number)
            for key, value in (*step.metrics.items(), *((fact, getattr(step, fact)) for fact in FACTS)):
                series = self.series.get(key)
                if series is None:
                    series = self.series[key] = Series()
                series.add(number, value)

    def join(self, later: Track) -> None:
        """Take the steps of another one, which come after these."""
        self._placed.clear()
        if later.steps and self.steps and self.steps[-1] % self.every:
            self.thin(self.every)  # it was there because it was the last
        self.steps.extend(later.steps)
        for key, series in later.series.items():
            self.series.setdefault(key, Series()).extend(series)

    def thin(self, every: int) -> None:
        self.every = every
        self._placed.clear()
        self.steps = array("q", (step for step in self.steps if step % every == 0))
        for series in self.series.values():
            series.keep(every)

    @property
    def evals(self) -> Series:
        """Return the series of the main evaluation."""
        return self.sets.get("eval") or Series()

    def of(self, metric: str) -> Series:
        return self.sets.get(metric) or self.series.get(metric) or Series()

    def within(self, first: int, last: int) -> Track:
        """Return the finest track that covers the window."""
        detail = self.detail
        return detail.track if detail and detail.first <= first and last <= detail.last else self

    def values(self, step: int, beginning: str = "") -> dict[str, float]:
        """Return the values of a kept step, only of metrics whose names start with `beginning`."""
        values = {key: series.at(step) for key, series in self.series.items() if key.startswith(beginning)}
        return {key: value for key, value in values.items() if value is not None}

    # -- where steps lie on an axis --------------------------------------------------------------------------
    def placed(self, axis: str) -> dict[int, int]:
        """Return the x of each kept step. Where steps were left out, their tokens are estimated."""
        if axis in self._placed:
            return self._placed[axis]
        places = self._placed[axis] = dict[int, int]()
        series = self.of("tokens" if axis == "tokens" else "at")
        measured = dict(zip(series.xs, series.ys, strict=True))
        if axis == "tokens" and self.steps:
            before = max(self.steps[0] - self.every, 0)
            total = float(self.parent.place("tokens", before)) if self.parent is not None else 0.0
            for step in self.steps:
                total += max(measured.get(step, 0.0), 0.0) * (step - before)
                before = step
                places[step] = round(total)
        elif axis == "time":
            latest = 0
            began = (self.parent or self).began
            for step in self.steps:
                latest = max(latest, round((measured.get(step, began) - began) * 1000))
                places[step] = latest
        return places

    @property
    def began(self) -> float:
        """Return when the first kept step began."""
        if not self.steps:
            return 0.0
        return (self.of("at").at(self.steps[0]) or 0.0) - (self.of("seconds").at(self.steps[0]) or 0.0)

    def place(self, axis: str, step: int) -> int:
        """Return the x of any step, between those of the kept ones beside it."""
        if axis == "step" or not self.steps:
            return step if axis == "step" else 0
        i = bisect_left(self.steps, step)
        placed = self.placed(axis)
        if i == len(self.steps) or self.steps[i] == step:
            return placed[self.steps[min(i, len(self.steps) - 1)]]
        low = self.steps[i - 1] if i else min(step, 0)
        start = placed[low] if i else 0
        return start + round((placed[self.steps[i]] - start) * (step - low) / (self.steps[i] - low))

    def step_at(self, axis: str, x: int) -> int:
        """Return the kept step that is nearest to a place on an axis."""
        if axis == "step" or not self.steps:
            return x if axis == "step" else 0
        xs = list(self.placed(axis).values())
        i = bisect_left(xs, x)
        return self.steps[i if i < len(xs) and (not i or xs[i] - x <= x - xs[i - 1]) else i - 1]

    def along(self, axis: str, steps: array[int]) -> array[int]:
        """Return the x of many steps."""
        if axis == "step":
            return steps
        placed = self.placed(axis)
        return array("q", [placed[step] if step in placed else self.place(axis, step) for step in steps])

    def nearest(self, step: int, by: int = 0) -> int | None:
        """Return the kept step nearest to `step`, or the one that is `by` kept steps further on."""
        if not self.steps:
            return None
        i = bisect_left(self.steps, step)
        if i == len(self.steps) or (i and step - self.steps[i - 1] < self.steps[i] - step):
            i -= 1
        return self.steps[min(max(i + by, 0), len(self.steps) - 1)]


@dataclass
class Detail:
    """The steps first..last of a run at a finer grain."""

    first: int
    last: int
    track: Track


def stride(steps: int, kept: int) -> int:
    """Return a power of two of which at most `kept` of so many steps are multiples."""
    every = 1
    while steps // every > kept:
        every *= 2
    return every


@dataclass
class Window:
    """The part that is looked at: `span` steps (None: all) until `end` (None: the newest, whatever comes)."""

    span: int | None = None
    end: int | None = None

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and last step of the window when there are steps first..last."""
        if self.span is None or last - first < self.span:
            return first, last
        end = last if self.end is None else min(max(self.end, first + self.span - 1), last)
        return end - self.span + 1, end

    def zoom(self, factor: float, at: int | None, first: int, last: int) -> None:
        """Widen (above 1) or narrow the window about a step, which stays where it is; None: about the end."""
        low, high = self.bounds(first, last)
        span = max(round((high - low + 1) * factor), 4)
        if span > last - first:
            self.span = self.end = None
            return
        at = high if at is None else min(max(at, low), high)
        end = at + round((high - at) * factor)
        self.span = span
        self.end = None if end >= last else end

    def reveal(self, step: int, first: int, last: int) -> None:
        """Move as little as it takes to have a step within."""
        low, high = self.bounds(first, last)
        if self.span is not None and not low <= step <= high:
            end = step + self.span - 1 if step < low else step
            self.end = None if end >= last else end

    def move(self, part: float, first: int, last: int) -> None:
        """Move the window by a part of its width."""
        if self.span is not None:
            _, high = self.bounds(first, last)
            end = high + (round(self.span * part) or (1 if part > 0 else -1))
            self.end = None if end >= last else max(end, first + self.span - 1)

    def tail(self, span: int | None) -> None:
        """Show the last steps, whatever comes."""
        self.span = span
        self.end = None


def between(xs: array[int], first: int, last: int) -> tuple[int, int]:
    """Return the indices of the xs from first to last."""
    return bisect_left(xs, first), bisect_right(xs, last)
