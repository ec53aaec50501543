"""Writes what curves show to a file: a picture as PNG or SVG, or the numbers as CSV."""

import csv
import importlib.util
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lorad.client.histogram import AmountSpread
from lorad.errors import SpecError
from lorad.files import expanded
from lorad.text import one_line
from lorad.tui.curves.axes import x_ticks
from lorad.tui.curves.bars import BarChart, bar_chart
from lorad.tui.curves.drawing import Plot, y_range
from lorad.tui.curves.plot import LETTERS, LIGHT, CurveLook, extent, names, part, plot, smoothing
from lorad.tui.curves.series import Track, between
from lorad.tui.curves.svg_picture import X, columns_of, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".csv")
_SIZE = (6.4, 3.8)  # inches of a chart
_DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 2, 2)), (0, (4, 4)), (0, (10, 2, 2, 2)))


def refuse(name: str) -> None:
    """Raise SpecError for a name to which nothing can be written."""
    path = expanded(name)
    if path.suffix.lower() not in KINDS:
        hint = "Name it curves.png, curves.svg or curves.csv, say."
        raise SpecError(f"{name or 'a name'} ends with none of {', '.join(KINDS)}", hint=hint)
    if not (directory := path.absolute().parent).is_dir():
        raise SpecError(f"there is no directory {directory}", hint=f"Make it first: `mkdir -p {directory}`.")
    if path.is_dir():
        raise SpecError(f"{path} is a directory", hint=f"Name a file in it: {path / 'curves.svg'}, say.")
    if path.suffix.lower() == ".png" and not has_png():
        install = f"{sys.executable} -m pip install matplotlib"
        hint = f"Write {path.with_suffix('.svg')} instead, or install it: `{install}`."
        raise SpecError("a PNG needs matplotlib, which is not installed", hint=hint)


def has_png() -> bool:
    """Whether PNGs can be written here."""
    return importlib.util.find_spec("matplotlib") is not None


def write(
    name: str,
    metrics: Sequence[str],
    runs: Mapping[str, Track],
    look: CurveLook,
    window: tuple[int, int] | None = None,
) -> Path:
    """Write charts of metrics with all runs to a file, which is replaced where it exists; return its path.

    window: the first and last x that are shown; None: all. Raises SpecError for a name that cannot be.
    """
    refuse(name)
    path = expanded(name).absolute()
    first, last = window or extent(runs.values(), look.x) or (0, 0)
    if path.suffix.lower() == ".csv":
        data = _as_csv(metrics, runs, look, first, last).encode()
    else:
        charts = {metric: plot(metric, [*runs.values()], look, first, last)[0] for metric in metrics}
        is_svg = path.suffix.lower() == ".svg"
        data = picture(charts, [*runs]).encode() if is_svg else _as_png(charts, [*runs])
    path.write_bytes(data)
    return path


def write_histograms(name: str, charts: Mapping[str, Sequence[AmountSpread]], runs: Sequence[str]) -> Path:
    """Write histograms of amounts with all runs to a file, as `write` does."""
    refuse(name)
    path = expanded(name).absolute()
    if path.suffix.lower() == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["run", "metric", "step", "low", "high", "count"])
        for spread in (spread for spreads in charts.values() for spread in spreads):
            about = (spread.run, spread.metric, spread.step)
            writer.writerows((*about, part.low, part.high, part.count) for part in spread.bins)
        data = text.getvalue().encode()
    else:
        drawn = {metric: bar_chart(spreads) for metric, spreads in charts.items()}
        data = picture(drawn, runs).encode() if path.suffix.lower() == ".svg" else _as_png(drawn, runs)
    path.write_bytes(data)
    return path


# -- numbers -------------------------------------------------------------------------------------------------
def _as_csv(metrics: Sequence[str], runs: Mapping[str, Track], look: CurveLook, first: int, last: int) -> str:
    """Write step, x where that is another one, value, and the smoothed one, in order of steps."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    along = {"step": [], "tokens": ["tokens"], "time": ["seconds"]}[look.x]
    smoothed = ["smoothed"] if look.smooth else []
    writer.writerow(["run", "metric", "step", *along, "value", *smoothed])
    for metric in metrics:
        for run, whole in runs.items():
            track = part(whole, look.x, first, last)
            series = whole.sets.get(metric) or track.of(metric)
            places = whole if metric in whole.sets else track
            view = series.view(smoothing(metric, whole, look), False)
            steps = [*series.xs, *series.bad]
            values = [*map(str, series.ys), *("nan" for _ in series.bad)]
            smooth = [*map(str, view.ys), *("" for _ in series.bad)]
            for step, value, soft in sorted(zip(steps, values, smooth, strict=True), key=lambda row: row[0]):
                x = places.place(look.x, step)
                if first <= x <= last:
                    beside: list[float] = [] if look.x == "step" else [x if look.x == "tokens" else x / 1000]
                    row = [run, metric, step, *beside, value, soft]
                    writer.writerow(row if look.smooth else row[:-1])
    return text.getvalue()


# -- pictures ------------------------------------------------------------------------------------------------
def _as_png(charts: Mapping[str, Plot | BarChart], runs: Sequence[str]) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = columns_of(len(charts))
    rows = -(-len(charts) // columns)
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * rows), layout="constrained")
        grid = [*figure.subplots(rows, columns, squeeze=False).flat]
        for axes, (metric, drawn) in zip(grid, charts.items(), strict=False):
            if isinstance(drawn, BarChart):
                for run in range(len(runs)):
                    own = [bar[1:] for bar in drawn.bars if bar[0] == run]
                    lefts, widths, heights = zip(*own, strict=True) if own else ((), (), ())
                    axes.bar(lefts, heights, widths, align="edge", color=_color(run), label=_label(run, runs))
                axes.set_xticks(*zip(*drawn.ticks, strict=True) if drawn.ticks else ([], []))
                axes.set_title(drawn.title)
                axes.spines[["top", "right"]].set_visible(False)
                axes.legend(frameon=False)
            else:
                _chart(axes, metric, drawn, runs)
        for axes in grid[len(charts) :]:
            axes.set_axis_off()
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=130, metadata={"Software": None})
    return file.getvalue()


def _chart(axes: "Axes", metric: str, drawn: Plot, runs: Sequence[str]) -> None:
    for curve in drawn.curves:
        label = _label(curve.place, runs)
        inside = slice(*between(curve.xs, drawn.first, drawn.last))
        ys = [_y(drawn, y) for y in curve.ys[inside]]
        name = None if curve.ground else label
        (line,) = axes.plot(curve.xs[inside], ys, color=_color(curve.place), label=name)
        line.set(alpha=0.3 if curve.ground else 1.0, linewidth=0.8 if curve.ground else 1.7)
        line.set_linestyle("-" if curve.ground else _DASHES[curve.place % len(_DASHES)])
    if marks := [(x, _y(drawn, y)) for x, y in drawn.marks if drawn.first <= x <= drawn.last]:
        letter = f"{LETTERS[0]} " if len(runs) > 1 else ""
        axes.plot(
            *zip(*marks, strict=True), "D", color=LIGHT[-1], markersize=5, label=f"{letter}held-out eval"
        )
    for x, y, place in drawn.best:
        axes.plot([x], [_y(drawn, y)], "*", color=_color(place), markersize=13, markeredgecolor="white")
    axes.set_xlim(drawn.first, max(drawn.last, drawn.first + 1))
    if drawn.log:
        axes.set_yscale("log")
    if (ends := y_range(drawn)) is not None:
        axes.set_ylim(_y(drawn, ends[0]), _y(drawn, ends[1]))
    at, texts = x_ticks(drawn.x, drawn.first, drawn.last, 6)
    axes.set_xticks(at, texts)
    axes.set(title=names(metric)[1], xlabel=X[drawn.x])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, texts = axes.get_legend_handles_labels()
    named = [*zip(handles, texts, strict=True)]
    curves = len(runs)  # they are drawn from the last to the first
    axes.legend(*zip(*named[:curves][::-1], *named[curves:], strict=True), frameon=False)


def _label(place: int, runs: Sequence[str]) -> str:
    letter = f"{LETTERS[place % len(LETTERS)]} " if len(runs) > 1 else ""
    label = letter + one_line(runs[place])
    return f" {label}" if label.startswith("_") else label  # matplotlib would leave it out


def _color(place: int) -> str:
    return LIGHT[place % len(LIGHT)]


def _y(drawn: Plot, y: float) -> float:
    return 10.0**y if drawn.log else y
