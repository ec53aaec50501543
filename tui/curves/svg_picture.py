"""Charts of metrics as SVG: axes with round numbers, a curve or bars for each run, one legend below all."""

from collections.abc import Mapping, Sequence

from lorad import svg
from lorad.tui.curves.axes import ticks, x_ticks
from lorad.tui.curves.bars import BarChart
from lorad.tui.curves.drawing import BEST, MARKER, Plot, numbers, y_range
from lorad.tui.curves.plot import LETTERS, LIGHT, MARKS, names
from lorad.tui.curves.series import between

_COLUMNS = 3  # of charts in a picture
X = {"step": "step", "tokens": "tokens sampled", "time": "time since the run began"}
_WIDTH = 640  # pixels of a chart
_HEIGHT = 380
_LEFT = 64  # its margins
_RIGHT = 16
_TOP = 30
_BOTTOM = 44
_ACROSS = _WIDTH - _LEFT - _RIGHT
_UP = _HEIGHT - _TOP - _BOTTOM
_LINE = 20  # pixels of a line of the legend
_DASHES = ("none", "8 3", "3 3", "8 3 3 3", "5 5", "12 3 3 3")


def columns_of(charts: int) -> int:
    """Return how many charts stand side by side."""
    return 2 if charts == 4 else min(charts, _COLUMNS)


def picture(charts: Mapping[str, Plot | BarChart], runs: Sequence[str], *, legend: bool = True) -> str:
    """Draw the charts of metrics, with a legend below that says which curve is whose.

    runs: their names, by the places of their curves.
    """
    columns = columns_of(len(charts))
    height = -(-len(charts) // columns) * _HEIGHT
    parts = []
    for number, (metric, drawn) in enumerate(charts.items()):
        corner = f"translate({number % columns * _WIDTH} {number // columns * _HEIGHT})"
        chart = _bars(drawn) if isinstance(drawn, BarChart) else _chart(metric, drawn)
        parts.append(svg.element("g", chart, transform=corner))
    entries = [
        (place, name if len(runs) == 1 else f"{LETTERS[place]} {name}") for place, name in enumerate(runs)
    ]
    if any(isinstance(drawn, Plot) and drawn.marks for drawn in charts.values()):
        entries.append((MARKS, f"{MARKER} held-out eval"))
    entries = entries if legend else []
    for row, (place, name) in enumerate(entries):
        y = height + _LINE * (row + 0.5)
        if name.startswith(MARKER):
            parts.append(svg.text((_LEFT + 36, y), name, fill=LIGHT[place]))
        else:
            parts.append(svg.curve([(_LEFT, y - 4), (_LEFT + 40, y - 4)], **_look(place)))
            parts.append(svg.text((_LEFT + 50, y), name))
    ground = svg.element("rect", width="100%", height="100%", fill="white")
    size = columns * _WIDTH, height + _LINE * len(entries)
    return svg.document(*size, [ground, *parts], font_size=12)


def _look(place: int) -> dict[str, object]:
    return {
        "stroke": LIGHT[place % len(LIGHT)],
        "stroke_width": 1.7,
        "stroke_dasharray": _DASHES[place % len(_DASHES)],
    }


def _chart(metric: str, drawn: Plot) -> str:
    """Draw one chart; without curves where none has a point in the window."""
    head = svg.text((_LEFT + _ACROSS / 2, _TOP - 12), names(metric)[1], text_anchor="middle", font_size=14)
    below = svg.text((_LEFT + _ACROSS / 2, _HEIGHT - 8), X[drawn.x], text_anchor="middle")
    low, high = y_range(drawn) or (0.0, 1.0)
    last = max(drawn.last, drawn.first + 1)

    def place(x: float, y: float) -> svg.Place:
        return (x - drawn.first) / (last - drawn.first) * _ACROSS, (high - y) / (high - low) * _UP

    parts = []
    for y, words in zip(*numbers(drawn, low, high, 24), strict=True):
        at = _TOP + place(0, y)[1]
        parts.append(svg.line((_LEFT, at), (_LEFT + _ACROSS, at), stroke="#ddd"))
        parts.append(svg.text((_LEFT - 6, at + 4), words, text_anchor="end"))
    for x, words in zip(*x_ticks(drawn.x, drawn.first, drawn.last, 6), strict=True):
        at = _LEFT + place(x, 0)[0]
        parts.append(svg.line((at, _TOP), (at, _TOP + _UP), stroke="#ddd"))
        parts.append(svg.text((at, _TOP + _UP + 16), words, text_anchor="middle"))
    inside = []
    for curve in drawn.curves:
        part = slice(*between(curve.xs, drawn.first, drawn.last))
        faint = {"opacity": 0.3, "stroke_width": 0.8, "stroke_dasharray": "none"} if curve.ground else {}
        inside.append(svg.curve(map(place, curve.xs[part], curve.ys[part]), **_look(curve.place) | faint))
    signs = [(x, y, MARKER, MARKS) for x, y in drawn.marks if drawn.first <= x <= drawn.last]
    for x, y, sign, color in [*signs, *((x, y, BEST, run) for x, y, run in drawn.best)]:
        across, up = place(x, y)
        fill = LIGHT[color % len(LIGHT)]
        inside.append(svg.text((across, up + 5), sign, fill=fill, font_size=16, text_anchor="middle"))
    area = svg.element("svg", "".join(inside), x=_LEFT, y=_TOP, width=_ACROSS, height=_UP)  # it cuts off
    axes = svg.curve([(_LEFT, _TOP), (_LEFT, _TOP + _UP), (_LEFT + _ACROSS, _TOP + _UP)], stroke="black")
    return "".join([head, below, *parts, axes, area])


def _bars(drawn: BarChart) -> str:
    wide = _ACROSS / max(drawn.bins, 1)
    parts = [svg.text((_LEFT + _ACROSS / 2, _TOP - 12), drawn.title, text_anchor="middle", font_size=14)]
    for share in ticks(0.0, drawn.highest, 6):
        at = _TOP + _UP * (1 - share / drawn.highest)
        parts.append(svg.line((_LEFT, at), (_LEFT + _ACROSS, at), stroke="#ddd"))
        parts.append(svg.text((_LEFT - 6, at + 4), f"{share:.0%}", text_anchor="end"))
    for x, words in drawn.ticks:
        parts.append(svg.text((_LEFT + x * wide, _TOP + _UP + 16), words, text_anchor="middle"))
    for place, left, width, share in drawn.bars:
        up = _UP * share / drawn.highest
        parts.append(
            svg.element(
                "rect",
                x=_LEFT + left * wide,
                y=_TOP + _UP - up,
                width=width * wide,
                height=up,
                fill=LIGHT[place % len(LIGHT)],
            )
        )
    return "".join([*parts, svg.line((_LEFT, _TOP + _UP), (_LEFT + _ACROSS, _TOP + _UP), stroke="black")])
