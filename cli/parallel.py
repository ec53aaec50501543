"""Parallel coordinates of a sweep, as text and as SVG: a line for each run, through its values and score."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from lorad import svg
from lorad.cli import output, table
from lorad.records.sweeps import LOWER_IS_BETTER, Sweep, SweepRun

_ROWS = 13  # cells of the picture
_NARROWEST = 40
_FEW = 6  # values of an axis that all get a label
_LOG_RATIO = 20.0  # from which an axis is logarithmic
_WIDTH = 900  # pixels of the SVG
_HEIGHT = 420
_MARGIN = 60
SCORES: dict[str, Callable[[SweepRun], float | None]] = {
    "eval": lambda run: run.eval_last,
    "nll": lambda run: run.nll_last,
    "reward": lambda run: run.reward_mean,
    "loss": lambda run: run.loss_mean,
}


class _Axis(NamedTuple):
    """One key, or the score.

    places: the place of each run, from 0 at the bottom to 1; None where it has no value.
    ticks: places with a label.
    """

    name: str
    places: list[float | None]
    ticks: list[tuple[float, str]]


def lines(sweep: Sweep, runs: Sequence[SweepRun], width: int) -> list[str]:
    """Draw the picture in text, the best run in bold; nothing where there are fewer than two runs or axes.

    runs: the runs of the sweep, the best first.
    """
    axes = _axes(sweep, runs)
    if len(runs) < 2 or len(axes) < 2:
        return []
    width = max(width, _NARROWEST)
    label = max(len(text) for axis in axes for _, text in axis.ticks) + 1
    columns = [round(place * (width - label - 1) / (len(axes) - 1)) for place in range(len(axes))]
    cells = [[" "] * width for _ in range(_ROWS)]
    looks = [[""] * width for _ in range(_ROWS)]
    for number in reversed(range(len(runs))):  # the best last, on top
        for x, y in _path([axis.places[number] for axis in axes], columns):
            cells[y][x], looks[y][x] = ("━", "1;32") if number == 0 else ("·", "2")
    head = [" "] * width  # the name of each axis, where there is room
    for axis, column in zip(axes, columns, strict=True):
        start = max(0, min(column, width - len(axis.name)))
        if not "".join(head[max(0, start - 1) : start + len(axis.name)]).strip():
            head[start : start + len(axis.name)] = axis.name
        for row in range(_ROWS):
            cells[row][column] = "│"
            looks[row][column] = ""
        for place, text in axis.ticks:
            row = _row(place)
            cells[row][column + 1 : column + 1 + len(text)] = text
            looks[row][column + 1 : column + 1 + len(text)] = [""] * len(text)
    drawn = []
    for chars, codes in zip(cells, looks, strict=True):
        end = len("".join(chars).rstrip())
        parts = groupby(list(zip(chars, codes, strict=True))[:end], key=lambda cell: cell[1])
        drawn.append("".join(table.styled("".join(char for char, _ in part), code) for code, part in parts))
    best = f"━ {output.printable(runs[0].name)} is the best"
    return ["".join(head[:width]).rstrip(), *drawn, best]


def picture(sweep: Sweep, runs: Sequence[SweepRun]) -> str:
    """Draw the picture as SVG: from blue for the worst run to red for the best."""
    axes = _axes(sweep, runs)
    gap = (_WIDTH - 2 * _MARGIN) / max(len(axes) - 1, 1)
    xs = [_MARGIN + gap * place for place in range(len(axes))]
    parts = [svg.element("rect", width=_WIDTH, height=_HEIGHT, fill="white")]
    for number in reversed(range(len(runs))):
        share = number / max(len(runs) - 1, 1)
        places = [
            (x, _pixel(place))
            for x, axis in zip(xs, axes, strict=True)
            if (place := axis.places[number]) is not None
        ]
        look = {"stroke": f"hsl({240 * share:.0f},70%,50%)", "stroke_width": 3 if number == 0 else 1.5}
        parts.append(svg.curve(places, svg.title(runs[number].name), opacity=0.8, **look))
    for x, axis in zip(xs, axes, strict=True):
        parts.append(svg.line((x, _pixel(1)), (x, _pixel(0)), stroke="black"))
        parts.append(svg.text((x, 28), axis.name, text_anchor="middle"))
        parts += [svg.text((x + 5, _pixel(place) + 4), words) for place, words in axis.ticks]
    return svg.document(_WIDTH, _HEIGHT, parts, font_size=12) + "\n"


def _pixel(place: float) -> float:
    return _HEIGHT - _MARGIN / 2 - place * (_HEIGHT - _MARGIN * 1.5)


def _axes(sweep: Sweep, runs: Sequence[SweepRun]) -> list[_Axis]:
    """Make an axis of each key that differs among the runs, and one of the score, whose best is on top."""
    axes = []
    for key in sweep.grid:
        values = [run.values.get(key) for run in runs]
        if len({json.dumps(value) for value in values}) > 1:
            axes.append(_axis(key, values))
    metric = next((name for name, of in SCORES.items() if any(of(run) is not None for run in runs)), None)
    if metric is not None:
        axis = _axis(metric, [SCORES[metric](run) for run in runs])
        if metric in LOWER_IS_BETTER:
            places = [None if place is None else 1 - place for place in axis.places]
            axis = _Axis(axis.name, places, [(1 - place, text) for place, text in axis.ticks])
        axes.append(axis)
    return axes


def _axis(name: str, values: Sequence[Any]) -> _Axis:
    """Place numbers by size, and anything else in the order in which it comes."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        low = min(present)
        high = max(present)
        scale = math.log if low > 0 and high / low >= _LOG_RATIO else float
        span = scale(high) - scale(low)

        def place(value: Any) -> float:
            return (scale(value) - scale(low)) / span if span else 0.5

        ticked = sorted(set(present)) if len(set(present)) <= _FEW else [low, high]
        places = [None if value is None else place(value) for value in values]
        return _Axis(name, places, [(place(value), f"{value:.4g}") for value in ticked])
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    distinct = list(dict.fromkeys(words))
    most = max(len(distinct) - 1, 1)
    ticks = [(number / most, word) for number, word in enumerate(distinct)]
    return _Axis(name, [distinct.index(word) / most for word in words], ticks)


def _row(place: float) -> int:
    return round((1 - place) * (_ROWS - 1))


def _path(places: Sequence[float | None], columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the cells of a line through its places; none beside an axis where it has no value."""
    stops = list(zip(columns, places, strict=True))
    for (left, start), (right, end) in pairwise(stops):
        if start is None or end is None:
            continue
        for x in range(left, right + 1):
            share = (x - left) / max(right - left, 1)
            yield x, _row(start + (end - start) * share)
