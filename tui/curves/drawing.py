"""A chart in text: curves of Braille dots over one pair of axes, markers, round numbers beside them.

It is drawn into cells, each with a character and the name of its look; colours are the widget's. A stretch of
x that falls onto one column of dots is one stroke from its smallest to its largest value, so that no spike is
lost.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lorad.tui.curves.axes import bare, decades, labels, ticks, x_ticks
from lorad.tui.curves.series import between

# Braille by the four dots of the left and of the right column, the top one lowest in each
_LEFT = (0x01, 0x02, 0x04, 0x40)
_RIGHT = (0x08, 0x10, 0x20, 0x80)
_GLYPHS = [
    chr(
        0x2800
        + sum(_LEFT[i] for i in range(4) if left >> i & 1)
        + sum(_RIGHT[i] for i in range(4) if right >> i & 1)
    )
    for left in range(16)
    for right in range(16)
]
# which cells of a curve are drawn, by the run's place
_DASHES = ("1", "1110", "10", "111010", "1100", "11111010")
MARKER = "◆"
BEST = "★"
_BAD = "✗"
_UP = "▴"
_DOWN = "▾"
_TRIMMED = 0.03  # of the strokes at either end may lie outside, where they are far from all others
_FAR = 1.5  # times the height of the others
_MARGIN = 0.04  # above and below
_LARGEST = 1e300  # twice as much is still a number
GUTTER = 8  # cells before the plot, the same for all charts, so that they stand below each other


class _Canvas:
    """Columns of dots as whole numbers, bit 0 at the top."""

    def __init__(self, columns: int, dots: int) -> None:
        self.columns = [0] * columns
        self.dots = dots

    def stroke(self, column: int, top: int, bottom: int) -> None:
        if top > bottom:
            top, bottom = bottom, top
        self.columns[column] |= ((2 << (bottom - top)) - 1) << top

    def strokes(
        self, at: Sequence[int], first: list[int], top: list[int], bottom: list[int], last: list[int]
    ) -> None:
        """Draw a vertical stroke in each column, and join the last point of one to the first of the next."""
        columns = self.columns
        x0 = -1
        y0 = 0
        for x, y, high, low, y1 in zip(at, first, top, bottom, last, strict=True):
            if x0 >= 0:
                if x > x0 + 1:
                    self.join(x0, y0, x, y)
                else:
                    middle = (y0 + y) // 2
                    self.stroke(x0, y0, middle)
                    high = min(high, middle)
                    low = max(low, middle)
            columns[x] |= ((2 << (low - high)) - 1) << high
            x0 = x
            y0 = y1

    def join(self, x0: int, y0: int, x1: int, y1: int) -> None:
        """Draw a line, with half of each step in the column at either side of it."""
        slope = (y1 - y0) / max(x1 - x0, 1)
        y = y0
        for column in range(x0, x1):
            middle = y0 + round((column - x0 + 0.5) * slope)
            self.stroke(column, y, middle)
            y = middle
        self.stroke(x1, y, y1)

    def cells(self) -> Iterator[tuple[int, int, str]]:
        """Yield the row, the cell and the character of what is not empty."""
        for cell, (left, right) in enumerate(zip(self.columns[::2], self.columns[1::2], strict=True)):
            both = left | right
            row = ((both & -both).bit_length() - 1) // 4 if both else 0
            left >>= 4 * row
            right >>= 4 * row
            while left or right:
                if dots := (left & 15) << 4 | right & 15:
                    yield row, cell, _GLYPHS[dots]
                left >>= 4
                right >>= 4
                row += 1


@dataclass(frozen=True)
class Curve:
    """The points of the run at a place, joined by a line. ground: it is drawn faintly beneath the others."""

    xs: array[int]
    ys: array[float]
    place: int = 0
    letter: str = ""
    ground: bool = False


@dataclass(frozen=True)
class Plot:
    """The content of a chart.

    Attributes:
        curves: The curves, the lowest one first.
        marks: The markers of the first run.
        bad: The steps of the first run that have no number.
        log: The y are exponents of ten.
        spikes: No stroke may lie outside.
        x: What the x are, one of AXES.
        best: The best point of each curve, with the place of its run.
    """

    curves: Sequence[Curve]
    first: int
    last: int
    marks: Sequence[tuple[int, float]] = ()
    bad: Sequence[int] = ()
    log: bool = False
    spikes: bool = False
    x: str = "step"
    best: Sequence[tuple[int, float, int]] = ()


def dashes(place: int) -> str:
    """Return the line of a run as it stands in a legend."""
    return "".join("─" if cell == "1" else " " for cell in (_DASHES[place % len(_DASHES)] * 6)[:6])


class _Stroke(NamedTuple):
    """The part of a curve in one column of dots."""

    column: int
    first: float
    low: float
    high: float
    last: float


@dataclass(frozen=True)
class _Scale:
    """Values onto dots, first..last at 0..dots-1; what is outside lands at the edge."""

    first: float
    last: float
    dots: int

    def __call__(self, value: float) -> int:
        if self.last == self.first:
            return self.dots // 2
        dot = int((value - self.first) / (self.last - self.first) * (self.dots - 1) + 0.5)
        return dot if 0 <= dot < self.dots else 0 if dot < 0 else self.dots - 1

    def all(self, values: Sequence[float]) -> list[int]:
        """Return the dots of many values."""
        if self.last == self.first:
            return [self.dots // 2] * len(values)
        first = self.first
        each = (self.dots - 1) / (self.last - self.first)
        most = self.dots - 1
        dots = [int((value - first) * each + 0.5) for value in values]
        if min(dots) < 0 or max(dots) > most:
            return [min(max(dot, 0), most) for dot in dots]
        return dots

    def value(self, dot: float) -> float:
        return self.first + (self.last - self.first) * min(max(dot / max(self.dots - 1, 1), 0.0), 1.0)


@dataclass
class Picture:
    """What was drawn: `chars[row][cell]`; the last row has the numbers of x.

    Attributes:
        looks: The name of each cell's look: axis, grid, label, mark, bad, cut, letter, best0, ground0, run0 …
        cut: How many strokes lie outside.
    """

    chars: list[list[str]]
    looks: list[list[str]]
    across: _Scale = field(default_factory=lambda: _Scale(0.0, 0.0, 2))
    cut: int = 0

    def put(self, row: int, cell: int, char: str, look: str) -> None:
        self.chars[row][cell] = char
        self.looks[row][cell] = look

    def write(self, row: int, cell: int, text: str, look: str) -> None:
        for i, char in enumerate(text):
            if 0 <= cell + i < len(self.chars[row]):
                self.put(row, cell + i, char, look)


def _strokes(curve: Curve, across: _Scale) -> list[_Stroke]:
    """Return one stroke for each column of dots that has a point within the scale."""
    xs = curve.xs
    ys = curve.ys
    first = across.first
    begin, end = between(xs, int(first), int(across.last))
    strokes = list[_Stroke]()
    width = (across.last - first) / max(across.dots - 1, 1)
    if begin < end and not width:
        return [_Stroke(across(first), *(ys[begin],) * 4)]
    while begin < end:
        column = int((xs[begin] - first) / width + 0.5)
        after = bisect_left(xs, first + (column + 0.5) * width, begin + 1, end)
        if after == begin + 1:
            strokes.append(_Stroke(column, *(ys[begin],) * 4))
        else:
            part = ys[begin:after]
            strokes.append(_Stroke(column, part[0], min(part), max(part), part[-1]))
        begin = after
    return strokes


def _bounds(plot: Plot, drawn: Sequence[tuple[Curve, list[_Stroke]]]) -> tuple[float, float]:
    """Return the smallest and the largest y to show, without the spikes that are far from all others.

    Raises ValueError where there is neither a stroke nor a marker.
    """
    ends = [_extent([y for stroke in of for y in stroke[2:4]], trim=not plot.spikes) for _, of in drawn]
    values = [y for x, y in plot.marks if plot.first <= x <= plot.last]
    low = max(min([*(low for low, _ in ends), *values]), -_LARGEST)
    high = min(max([*(high for _, high in ends), *values]), _LARGEST)
    room = (high - low) * _MARGIN or abs(high) * 0.1 or 1.0
    bottom = low - room
    return (0.0 if low >= 0.0 > bottom and not plot.log else bottom), high + room


def y_range(plot: Plot) -> tuple[float, float] | None:
    """Return the smallest and largest y that a picture of it shows; None where there is nothing."""
    across = _Scale(plot.first, plot.last, 2000)
    drawn = [(curve, of) for curve in plot.curves if (of := _strokes(curve, across))]
    if not drawn and not any(plot.first <= x <= plot.last for x, _ in plot.marks):
        return None
    return _bounds(plot, drawn)


def _extent(values: list[float], *, trim: bool) -> tuple[float, float]:
    values.sort()
    many = int(len(values) * _TRIMMED) + 1
    if not trim or len(values) < 12:
        return values[0], values[-1]
    low = values[many]
    high = values[-1 - many]
    far = (high - low) * _FAR
    least = low if low - values[0] > far > 0 else values[0]
    return least, high if values[-1] - high > far > 0 else values[-1]


def draw(plot: Plot, width: int, height: int) -> Picture | None:
    """Draw a plot into so many cells; None where there is nothing to draw, or no room."""
    rows = height - 1
    if width < GUTTER + 4 or rows < 2:
        return None
    picture = Picture([[" "] * width for _ in range(rows + 1)], [["axis"] * width for _ in range(rows + 1)])
    picture.across = _Scale(plot.first, plot.last, (width - GUTTER) * 2)
    drawn = [(curve, of) for curve in plot.curves if (of := _strokes(curve, picture.across))]
    if not drawn and not any(plot.first <= x <= plot.last for x, _ in plot.marks):
        return None
    low, high = _bounds(plot, drawn)
    up = _Scale(high, low, rows * 4)
    _axes(picture, plot, up)
    for curve, of in drawn:
        _curve(picture, curve, of, up)
    for curve, of in drawn:  # near its end the letter of its run, each at a place of its own
        if curve.letter and not curve.ground:
            end = of[max(len(of) - 4 - 6 * curve.place, 0)] if len(of) > 8 else of[-1]
            picture.put(up(end.last) // 4, GUTTER + end.column // 2, curve.letter, f"letter{curve.place}")
    for x, y in plot.marks:
        if plot.first <= x <= plot.last:
            picture.put(up(y) // 4, GUTTER + picture.across(x) // 2, MARKER, "mark")
    for x, y, place in plot.best:
        picture.put(up(y) // 4, GUTTER + picture.across(x) // 2, BEST, f"best{place}")
    for x in plot.bad[slice(*between(array("q", plot.bad), plot.first, plot.last))]:
        picture.put(up.dots // 4 - 1, GUTTER + picture.across(x) // 2, _BAD, "bad")
    return picture


def _axes(picture: Picture, plot: Plot, up: _Scale) -> None:
    """Draw both axes, with round numbers at their places."""
    rows = up.dots // 4
    width = len(picture.chars[0])
    for row in range(rows):
        picture.put(row, GUTTER - 1, "│", "axis")
    for value, text in zip(*numbers(plot, up.last, up.first, rows), strict=True):
        row = up(value) // 4
        picture.write(row, 0, f"{text[: GUTTER - 1]:>{GUTTER - 1}}┤", "label")
        picture.write(row, GUTTER, "┈" * (width - GUTTER), "grid")
    room = max((width - GUTTER) // 12, 1)
    taken = GUTTER - 1
    for value, text in zip(*x_ticks(plot.x, plot.first, plot.last, room), strict=True):
        cell = GUTTER + picture.across(value) // 2 - len(text) // 2
        cell = min(max(cell, GUTTER - 1), width - len(text))
        if cell > taken or taken == GUTTER - 1:
            picture.write(rows, cell, text, "label")
            taken = cell + len(text)


def numbers(plot: Plot, low: float, high: float, rows: int) -> tuple[list[float], list[str]]:
    """Return where round numbers stand, and how they are written."""
    if plot.log:
        at = decades(low, high, rows // 3)
        return at, [bare(10.0**value) for value in at]
    at = ticks(low, high, max(rows // 4, 2))
    return at, labels(at)


def _curve(picture: Picture, curve: Curve, of: list[_Stroke], up: _Scale) -> None:
    """Draw a curve, with a sign where a spike that was cut off leaves the picture."""
    canvas = _Canvas(picture.across.dots, up.dots)
    columns, firsts, lows, highs, lasts = zip(*of, strict=True)
    canvas.strokes(columns, up.all(firsts), up.all(highs), up.all(lows), up.all(lasts))
    pattern = "1" if curve.ground else _DASHES[curve.place % len(_DASHES)]
    for column in range(len(canvas.columns)):
        if pattern[column // 2 % len(pattern)] == "0":
            canvas.columns[column] = 0
    look = f"{'ground' if curve.ground else 'run'}{curve.place}"
    for row, cell, glyph in canvas.cells():
        picture.put(row, GUTTER + cell, glyph, look)
    for stroke in of if not curve.ground else ():
        if stroke.high > up.first or stroke.low < up.last:
            row, sign = (0, _UP) if stroke.high > up.first else (up.dots // 4 - 1, _DOWN)
            picture.put(row, GUTTER + stroke.column // 2, sign, "cut")
            picture.cut += 1
