"""Writes what curves show to a file: a picture as PNG or SVG, or the numbers as CSV."""

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorad.errors import SpecError
from lorad.text import one_line
from lorad.tui.curves.axes import x_ticks
from lorad.tui.curves.drawing import Curve, Plot, y_range
from lorad.tui.curves.plot import LETTERS, LIGHT, Look, extent, names, part, plot, smoothing
from lorad.tui.curves.series import Track, between

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".csv")
_COLUMNS = 3  # of charts in a picture
_SIZE = (6.4, 3.8)  # inches of a chart
_DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 2, 2)), (0, (4, 4)), (0, (10, 2, 2, 2)))
_X = {"step": "step", "tokens": "tokens sampled", "time": "time since the run began"}


def wrong_with(name: str) -> str:
    """Say why nothing can be written to a file of this name; "" if something can."""
    path = Path(name).expanduser()
    if path.suffix.lower() not in KINDS:
        return f"{name or 'a name'} ends with none of {', '.join(KINDS)}"
    if not path.absolute().parent.is_dir():
        return f"there is no directory {path.absolute().parent}"
    if path.is_dir():
        return f"{path} is a directory"
    if path.suffix.lower() != ".csv" and importlib.util.find_spec("matplotlib") is None:
        return "pictures need matplotlib, which `pip install 'lorad[plot]'` installs; .csv does not"
    return ""


def write(
    name: str,
    metrics: Sequence[str],
    runs: Mapping[str, Track],
    look: Look,
    window: tuple[int, int] | None = None,
) -> Path:
    """Write charts of metrics with all runs to a file, which is replaced where it exists; return its path.

    window: the first and last x that are shown; None: all. Raises SpecError for a name that cannot be.
    """
    if wrong := wrong_with(name):
        raise SpecError(f"{name}: {wrong}" if name not in wrong else wrong, hint="Name it curves.png, say.")
    path = Path(name).expanduser().absolute()
    first, last = window or extent(runs.values(), look.x) or (0, 0)
    if path.suffix.lower() == ".csv":
        data = _as_csv(metrics, runs, look, first, last).encode()
    else:
        charts = {metric: plot(metric, [*runs.values()], look, first, last)[0] for metric in metrics}
        data = _as_picture(charts, [*runs], path.suffix.lower()[1:])
    path.write_bytes(data)
    return path


# -- numbers -------------------------------------------------------------------------------------------------
def _as_csv(metrics: Sequence[str], runs: Mapping[str, Track], look: Look, first: int, last: int) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    along = {"step": [], "tokens": ["tokens"], "time": ["seconds"]}[look.x]
    smoothed = ["smoothed"] if look.smooth else []
    writer.writerow(["run", "metric", "step", *along, "value", *smoothed])
    for metric in metrics:
        for run, track in runs.items():
            writer.writerows([run, metric, *row] for row in _rows(metric, track, look, first, last))
    return text.getvalue()


def _rows(metric: str, whole: Track, look: Look, first: int, last: int) -> list[list[Any]]:
    """Return step, x where that is another one, value, and the smoothed one, in order of steps."""
    track = part(whole, look.x, first, last)
    series = whole.sets.get(metric) or track.of(metric)
    places = whole if metric in whole.sets else track
    view = series.view(smoothing(metric, whole, look), False)
    steps = [*series.xs, *series.bad]
    values = [*map(str, series.ys), *("nan" for _ in series.bad)]
    smoothed = [*map(str, view.ys), *("" for _ in series.bad)]
    rows = list[list[Any]]()
    for step, value, soft in sorted(zip(steps, values, smoothed, strict=True), key=lambda row: row[0]):
        x = places.place(look.x, step)
        if first <= x <= last:
            beside: list[float] = [] if look.x == "step" else [x if look.x == "tokens" else x / 1000]
            rows.append([step, *beside, value, soft][: None if look.smooth else -1])
    return rows


# -- pictures ------------------------------------------------------------------------------------------------
def _as_picture(charts: Mapping[str, Plot], runs: Sequence[str], kind: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = 2 if len(charts) == 4 else min(len(charts), _COLUMNS)
    rows = -(-len(charts) // columns)
    plain = {"svg.hashsalt": "lorad", "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(plain):
        figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * rows), layout="constrained")
        grid = [*figure.subplots(rows, columns, squeeze=False).flat]
        for axes, (metric, drawn) in zip(grid, charts.items(), strict=False):
            _chart(axes, metric, drawn, runs)
        for axes in grid[len(charts) :]:
            axes.set_axis_off()
        file = io.BytesIO()
        about = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=130, metadata=about)
    return file.getvalue()


def _chart(axes: "Axes", metric: str, drawn: Plot, runs: Sequence[str]) -> None:
    for curve in drawn.curves:
        label = None if curve.ground else _label(curve, runs)
        (line,) = axes.plot(*_visible(curve, drawn), color=_color(curve.place), label=label)
        line.set(alpha=0.3 if curve.ground else 1.0, linewidth=0.8 if curve.ground else 1.7)
        line.set_linestyle("-" if curve.ground else _DASHES[curve.place % len(_DASHES)])
    if marks := [(x, _y(drawn, y)) for x, y in drawn.marks if drawn.first <= x <= drawn.last]:
        letter = f"{LETTERS[0]} " if len(runs) > 1 else ""
        xs, ys = [x for x, _ in marks], [y for _, y in marks]
        axes.plot(xs, ys, "D", color=LIGHT[-1], markersize=5, label=f"{letter}held-out eval")
    for x, y, place in drawn.best:
        axes.plot([x], [_y(drawn, y)], "*", color=_color(place), markersize=13, markeredgecolor="white")
    axes.set_xlim(drawn.first, max(drawn.last, drawn.first + 1))
    if drawn.log:
        axes.set_yscale("log")
    if (ends := y_range(drawn)) is not None:
        axes.set_ylim(_y(drawn, ends[0]), _y(drawn, ends[1]))
    at, texts = x_ticks(drawn.x, drawn.first, drawn.last, 6)
    axes.set_xticks(at, texts)
    axes.set(title=names(metric)[1], xlabel=_X[drawn.x])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, texts = axes.get_legend_handles_labels()
    named = [*zip(handles, texts, strict=True)]
    curves = len(runs)  # they are drawn from the last to the first
    axes.legend(*zip(*named[:curves][::-1], *named[curves:], strict=True), frameon=False)


def _label(curve: Curve, runs: Sequence[str]) -> str:
    """Name the run; matplotlib leaves out of its legend what begins with an underscore."""
    name = one_line(runs[curve.place])
    text = f"{LETTERS[curve.place % len(LETTERS)]} {name}" if len(runs) > 1 else name
    return f" {text}" if text.startswith("_") else text


def _color(place: int) -> str:
    return LIGHT[place % len(LIGHT)]


def _visible(curve: Curve, drawn: Plot) -> tuple[Sequence[float], Sequence[float]]:
    """Return the points of the window."""
    begin, end = between(curve.xs, drawn.first, drawn.last)
    return curve.xs[begin:end], [_y(drawn, y) for y in curve.ys[begin:end]]


def _y(drawn: Plot, y: float) -> float:
    return 10.0**y if drawn.log else y
