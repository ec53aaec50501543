"""The steps of the runs whose curves are shown, read so that each crosses the socket once, a page at a time.

Of a run with very many steps the server sends every n-th one; of the window that is looked at, more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lorad.client.client import Client
from lorad.records.measured import Evaluation
from lorad.records.runs import Run
from lorad.tui.curves.series import FINE, KEPT, Detail, Series, Track, stride

if TYPE_CHECKING:
    from lorad.tui.feed import Changes

_PAGE = 2000  # steps in one answer


@dataclass
class Part:
    """News of a run.

    Attributes:
        reset: This is another attempt, so what was read before is forgotten.
        every: From now on only steps that are multiples of this number are kept.
        steps: The steps that follow.
        evals: The series of the evaluations; None when nothing in them changed.
        detail: Another detail than before.
        finer: The steps that follow in the detail.
        gone: Why the run cannot be read.
    """

    run: str
    reset: bool = False
    every: int = 1
    steps: Track | None = None
    evals: dict[str, Series] | None = None
    detail: Detail | None = None
    finer: Track | None = None
    more: bool = False
    gone: str = ""

    def __bool__(self) -> bool:
        return bool(self.reset or self.steps or self.evals or self.detail or self.finer or self.gone)

    def applied(self, track: Track | None) -> Track:
        """Return the track with this part applied, or a new one if there is none or the part resets it."""
        if track is None or self.reset:
            track = Track(self.every)
        if self.every > track.every:
            track.thin(self.every)
        if self.steps is not None:
            track.join(self.steps)
        if self.evals is not None:
            track.sets = self.evals
        if self.detail is not None:
            track.detail = self.detail
            track.detail.track.parent = track
        if self.finer is not None and track.detail is not None:
            track.detail.track.join(self.finer)
            track.detail.last = self.finer.steps[-1]
        return track


@dataclass
class _Place:
    """How far a run was read. window: the steps first..last of its detail, and its stride."""

    life: tuple[Any, ...]
    every: int
    step: int = 0
    more: bool = True
    window: tuple[int, int, int] | None = None


@dataclass(eq=False)
class StepReader:
    """Remembers how far it read. Used by one thread."""

    _places: dict[str, _Place] = field(default_factory=dict)

    def read(
        self,
        client: Client,
        changes: Changes,
        run: Run,
        others: Sequence[str],
        window: tuple[int, int] | None,
    ) -> list[Part]:
        """Read `run` (as `show` returned it) and other runs by name; when that fails, nothing counts as read.

        window: the steps that are on screen; None: all.
        """
        rows = {run.name: run}
        try:
            for name in set(self._places) - {run.name, *others}:
                del self._places[name]
            places = {name: self._places.get(name) for name in others}
            due = [name for name, place in places.items() if not place or place.more or changes.touch(name)]
            if due:
                rows |= {row.name: row for row in client.named(due)}
            gone = [Part(name, gone=f"There is no run {name}.") for name in due if name not in rows]
            parts = [self._part(client, changes, row, window) for row in rows.values()] + gone
        except BaseException:
            self._places.clear()
            raise
        return [part for part in parts if part]

    def _part(self, client: Client, changes: Changes, row: Run, window: tuple[int, int] | None) -> Part:
        """Read one run; after a resume, which rewinds it, everything is read again."""
        name = row.name
        life = (row.created_at, row.attempt)
        place = self._places.get(name)
        reset = place is None or place.life != life
        if place is None or reset:
            place = self._places[name] = _Place(life, stride(row.step, KEPT))
        part = Part(name, reset, place.every)
        if reset or place.more or changes.touch(name):
            steps = client.steps(name, after=place.step, limit=_PAGE, every=place.every)[:_PAGE]
            steps = [step for step in steps if step.step > place.step]
            part.more = place.more = len(steps) == _PAGE
            if steps:
                part.steps = Track(place.every)
                part.steps.add(steps)
                place.step = steps[-1].step
            place.every = part.every = max(place.every, stride(place.step, KEPT))
        if reset or changes.touch(name, "eval"):
            part.evals = scores(client.evals(name))
        if window is not None and place.every > 1 and not place.more:
            self._window(client, place, part, *window)
        return part

    def _window(self, client: Client, place: _Place, part: Part, first: int, last: int) -> None:
        """Read the steps of a window and as many beside it, unless they are there."""
        span = max(last - first + 1, 1)
        last = min(last, place.step)
        every = stride(2 * span, FINE)
        if every >= place.every or first > last:
            return
        low = max(first - span // 2, 0)
        high = last + span // 2
        begin, end, grain = place.window or (0, 0, 0)
        if grain == every and begin <= first <= end and end - begin <= 4 * span:
            if last > end or part.steps:
                part.finer = self._some(client, part.run, end, high, every)
                end = part.finer.steps[-1] if part.finer else end
                place.window = (begin, end, every)
        else:
            track = self._some(client, part.run, low - 1, high, every) or Track(every)
            end = track.steps[-1] if track.steps else last
            part.detail = Detail(low, max(end, last), track)
            place.window = (low, end, every)

    def _some(self, client: Client, run: str, after: int, last: int, every: int) -> Track | None:
        steps = client.steps(run, after=after, limit=2 * FINE, every=every)
        track = Track(every)
        track.add(step for step in steps if step.step <= last)
        return track if track.steps else None


def read_whole(client: Client, run: Run, kept: int = KEPT) -> Track:
    """Read all of a run that is kept of it."""
    track = Track(stride(run.step, kept))
    after = 0
    while True:
        steps = [
            step
            for step in client.steps(run.name, after=after, limit=_PAGE, every=track.every)[:_PAGE]
            if step.step > after
        ]
        track.add(steps)
        if len(steps) < _PAGE:
            break
        after = steps[-1].step
    track.sets = scores(client.evals(run.name))
    return track


def scores(evals: Sequence[Evaluation]) -> dict[str, Series]:
    """Return a series of the main evaluation, and of each other figure."""
    series = {"eval": Series()}
    for evaluation in evals:
        series["eval"].add(evaluation.step, evaluation.score)
        for name, value in evaluation.figures.items():
            if name != "eval":
                series.setdefault(name, Series()).add(evaluation.step, value)
    return series
