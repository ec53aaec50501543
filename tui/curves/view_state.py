"""The state of the curves tab, without Textual: its runs, metrics and steps, and where the cursor is."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lorad.tui.curves.plot import SMOOTH, TAILS, extent
from lorad.tui.curves.remembered import CurveChoices, choices
from lorad.tui.curves.series import AXES, FACTS, Track, Window
from lorad.tui.curves.step_reader import Part

_Values = Mapping[str, float]


class Scene:
    """The state of the tab. Another thread reads `others` and `asked_window`; each is only ever replaced.

    others: the runs beside `run`, in the order of the legend.
    asked_window: the window whose steps are asked for; None: all.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.tracks: dict[str, Track] = {run: Track()}
        self.others: tuple[str, ...] = ()
        self.asked_window: tuple[int, int] | None = None
        chosen = choices()
        self.look = chosen.look()
        self.metrics = [*chosen.metrics]
        self.table = chosen.table
        self._tail: int | None = None  # so many steps are shown at the end, where that was asked for
        self.metric = 0  # the current one, by its place
        self.alone = False  # is it shown alone
        self.cursor: int | None = None  # None: the last step, whatever comes
        self.hover: int | None = None  # where the mouse is
        self.more = False  # is there more to read

    # -- runs ------------------------------------------------------------------------------------------------
    @property
    def track(self) -> Track:
        return self.tracks[self.run]

    @property
    def runs(self) -> Sequence[Track]:
        return list(self.tracks.values())

    def take(self, part: Part) -> None:
        """Take news of a run; where it is not shown any more, they are dropped."""
        if part.gone:
            self.drop(part.run)
        elif part.run in self.tracks:
            self.tracks[part.run] = part.applied(self.tracks[part.run])

    def add(self, run: str) -> None:
        self.tracks[run] = Track()
        self.others = (*self.others, run)

    def drop(self, run: str) -> None:
        if run in self.others:
            self.others = tuple(name for name in self.others if name != run)
            del self.tracks[run]

    # -- metrics ---------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.metrics[self.metric]

    def measured(self) -> list[str]:
        """Return all metrics that the runs have; the ones with a chart come first."""
        measured = {name for track in self.runs for name in (*track.series, *track.sets)}
        return [*self.metrics, *sorted(measured - {*self.metrics, *FACTS})]

    def choices(self) -> CurveChoices:
        look = self.look
        return CurveChoices(self.metrics, look.x, look.smooth, look.log, look.spikes, look.best, self.table)

    def shown(self, places: int) -> range:
        """Return the places of the metrics that fit on the page with the current one."""
        many = 1 if self.alone else min(places, len(self.metrics))
        first = min(self.metric // many * many, len(self.metrics) - many)
        return range(first, first + many)

    # -- steps -----------------------------------------------------------------------------------------------
    def ends(self) -> tuple[int, int]:
        """Return the first and last x of all."""
        return extent(self.runs, self.look.x) or (0, 0)

    def bounds(self) -> tuple[int, int]:
        """Return the first and last x of the window."""
        return self.look.window.bounds(*self.ends())

    def step_bounds(self) -> tuple[int, int]:
        """Return the first and last step of `run` in the window."""
        low, high = self.bounds()
        return self.track.step_at(self.look.x, low), self.track.step_at(self.look.x, high)

    def near(self, step: int) -> Track:
        """Return the track with the best data on a step of `run`."""
        low, high = self.step_bounds()
        return self.track.within(low, high) if low <= step <= high else self.track

    @property
    def step(self) -> int | None:
        """Return the step whose values are shown: the cursor's, or the last one in the window."""
        step = self.cursor if self.hover is None else self.hover
        step = self.step_bounds()[1] if step is None else step
        return self.near(step).nearest(step)

    @property
    def marked(self) -> int | None:
        """Return the x to draw the cursor at."""
        step = None if self.cursor is None and self.hover is None else self.step
        return None if step is None else self.near(step).place(self.look.x, step)

    def steps(self) -> list[int | None]:
        """Return the step whose values are shown, of each run: the one at the same x."""
        step = self.step
        axis = self.look.x
        if step is None or axis == "step":
            return [step] * len(self.tracks)
        x = self.near(step).place(axis, step)
        return [step, *(track.step_at(axis, x) for track in self.runs[1:])]

    def values(self) -> _Values:
        """Return the values of that step by metric."""
        step = self.step
        return {} if step is None else self.near(step).values(step)

    def before(self, many: int) -> Iterator[tuple[int, _Values]]:
        """Return the steps before that step, newest first, with their seconds."""
        step = self.step or 0
        track = self.near(step)
        end = bisect_left(track.steps, step)
        steps = reversed(track.steps[max(end - many, 0) : end])
        return ((number, track.values(number, "seconds")) for number in steps)

    # -- looking ---------------------------------------------------------------------------------------------
    def zoom(self, factor: float, at: int | None) -> None:
        """Zoom about a step; a factor of 0 shows all steps."""
        self._tail = None
        if factor:
            x = None if at is None else self.track.place(self.look.x, at)
            self.look.window.zoom(factor, x, *self.ends())
        else:
            self.look.window.tail(None)

    def change_look(self, what: str) -> None:
        """Smooth more, or have x by steps, tokens or time; else turn something of the look on or off."""
        match what:
            case "smooth":
                self.look.smooth = _following(SMOOTH, self.look.smooth)
            case "x":  # all of it is in the window then
                self.look.x = _following(AXES, self.look.x)
                self.look.window = Window()
                self._tail = None
            case _:
                setattr(self.look, what, not getattr(self.look, what))

    def show_tail(self) -> None:
        """Show fewer of the last steps, or all after the fewest."""
        self._tail = _following(TAILS, self._tail)
        track = self.track
        axis = self.look.x
        if self._tail is None or not track.steps:
            self.look.window.tail(None)
        else:
            last = track.steps[-1]
            self.look.window.tail(track.place(axis, last) - track.place(axis, max(last - self._tail, 0)))


def _following(values: Sequence[Any], value: Any) -> Any:
    """Return the next of the values, and after the last one the first."""
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]
