"""A curve of Braille dots with markers. Any number of points, in bounded memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.text import Text
from textual.widget import Widget

BUCKETS = 2048  # at most as many stretches of x are kept apart
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column within a cell
MARKER = "◆"


@dataclass(slots=True)
class Bucket:
    """What a stretch of x holds: spikes survive in `low` and `high`, joins in `first` and `last`."""

    x: float
    first: float
    last: float
    low: float
    high: float

    def take(self, later: Bucket) -> None:
        self.last, self.low, self.high = later.last, min(self.low, later.low), max(self.high, later.high)


class Series:
    """Points in order of x. When there are too many, neighbours merge; values that are not finite are left out."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.end = 0.0  # the last x
        self._per, self._filled = 1, 0

    def add(self, x: float, y: float | None) -> None:
        if y is None or not math.isfinite(y):
            return
        self.end = x
        point = Bucket(x, y, y, y, y)
        if self.buckets and self._filled < self._per:
            self.buckets[-1].take(point)
            self._filled += 1
            return
        self.buckets.append(point)
        self._filled = 1
        if len(self.buckets) > BUCKETS:
            self._halve()

    def _halve(self) -> None:
        pairs = zip(self.buckets[::2], self.buckets[1::2], strict=False)
        for left, right in pairs:
            left.take(right)
        odd = len(self.buckets) % 2
        self.buckets = self.buckets[::2]
        self._filled = 1 if odd else self._per * 2
        self._per *= 2


class Canvas:
    """Dots on cells of 2 x 4; (0, 0) is at the top left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cells = [bytearray(width) for _ in range(height)]

    def line(self, x0: int, y0: int, x1: int, y1: int) -> None:
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count + 1):
            x, y = x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)
            self.cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]

    def row(self, y: int) -> str:
        return "".join(chr(0x2800 + cell) if cell else " " for cell in self.cells[y])


@dataclass(frozen=True)
class Scale:
    """Values onto dots."""

    low: float
    high: float
    dots: int

    def __call__(self, value: float) -> int:
        part = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return min(max(round(part * (self.dots - 1)), 0), self.dots - 1)


def draw(series: Series, marks: list[tuple[float, float]], width: int, height: int) -> list[Text]:
    """Lines of text: the curve, its largest and smallest value at the left, the first and last x below."""
    marks = [(x, y) for x, y in marks if math.isfinite(y)]
    values = [b.low for b in series.buckets] + [b.high for b in series.buckets] + [y for _, y in marks]
    gutter = max((len(f"{v:.3g}") for v in values), default=0) + 1 if values else 0
    gutter = min(gutter, 9)
    plot, rows = width - gutter, height - 1
    if not values or plot < 4 or rows < 1:
        return [Text("nothing to draw yet" if not values else "too small to draw", style="dim")]
    ends = [x for x, _ in marks] + [b.x for b in series.buckets[:1]] + [series.end] * bool(series.buckets)
    across, up = Scale(min(ends), max(ends), plot * 2), Scale(min(values), max(values), rows * 4)
    canvas = _curve(series, across, up, Canvas(plot, rows))
    lines = [_row(canvas, y, f"{_label(y, rows, up):>{gutter - 1}} ") for y in range(rows)]
    for x, y in marks:
        line, cell = rows - 1 - up(y) // 4, gutter + across(x) // 2
        lines[line] = lines[line][:cell] + Text(MARKER, style="bold yellow") + lines[line][cell + 1 :]
    first, last = f"{across.low:g}", f"{across.high:g}"
    return [*lines, Text(" " * gutter + first + last.rjust(plot - len(first)), style="dim")]


def _curve(series: Series, across: Scale, up: Scale, canvas: Canvas) -> Canvas:
    """Each stretch is a stroke from its smallest to its largest value, joined to the one before."""
    floor, before = canvas.height * 4 - 1, None
    for bucket in series.buckets:
        x = across(bucket.x)
        if before is not None:
            canvas.line(before[0], before[1], x, floor - up(bucket.first))
        canvas.line(x, floor - up(bucket.low), x, floor - up(bucket.high))
        before = x, floor - up(bucket.last)
    return canvas


def _label(y: int, rows: int, up: Scale) -> str:
    if y == 0:
        return f"{up.high:.3g}"
    return f"{up.low:.3g}" if y == rows - 1 else ""


def _row(canvas: Canvas, y: int, label: str) -> Text:
    return Text.assemble((label, "dim"), (canvas.row(y), "green"))


class Chart(Widget):
    """Draws a series and markers as large as it is."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.series, self.marks = Series(), list[tuple[float, float]]()

    def clear(self) -> None:
        self.series, self.marks = Series(), []
        self.refresh()

    def render(self) -> Text:
        lines = draw(self.series, self.marks, self.size.width, self.size.height)
        return Text("\n", no_wrap=True, end="").join(lines)
