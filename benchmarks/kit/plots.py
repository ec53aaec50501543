"""Pictures as SVG: transparent, in colours that read on light and on dark pages,
with text that stays text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK = "#7d8590"  # readable on white and on GitHub's dark grey
COLOURS = ("#2f81f7", "#db6d28", "#3fb950")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lorad",  # the same numbers give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

ACROSS = 3  # panels beside each other

Points = Sequence[tuple[float, float]]


def draw_scaling(panels: Mapping[str, Mapping[str, Mapping[str, Points]]], file: Path) -> None:
    """panels: {x: {quantity: {series: points}}}; log axes, the quantities of one x below each other."""
    with mpl.rc_context(STYLE):
        quantities = list(next(iter(panels.values())))
        bands = -(-len(panels) // ACROSS)
        figure = Figure(figsize=(9, 2.2 * bands * len(quantities)), layout="constrained")
        axes: Any = figure.subplots(bands * len(quantities), ACROSS, sharey="row", squeeze=False)
        for index, (x, drawn) in enumerate(panels.items()):
            band, column = divmod(index, ACROSS)
            for line, quantity in enumerate(quantities):
                axis = axes[band * len(quantities) + line][column]
                _panel(axis, drawn[quantity])
                axis.set_xlabel(x)
                axis.set_ylabel("" if column else quantity)
        for empty in axes.flat:
            empty.set_visible(empty.has_data())
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=ACROSS)
        _save(figure, file)


def _panel(axis: Any, series: Mapping[str, Points]) -> None:
    for colour, (label, points) in zip(COLOURS, series.items(), strict=False):
        axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    axis.grid(visible=True)


def draw_trace(rows: Sequence[int], waiting: Sequence[int], max_rows: int, file: Path) -> None:
    """Rows that decode and samples that wait, at every decode step."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3), layout="constrained")
        axis: Any = figure.subplots()
        steps = range(len(rows))
        axis.fill_between(steps, rows, step="mid", color=COLOURS[0], alpha=0.35, linewidth=0)
        axis.step(steps, rows, where="mid", color=COLOURS[0], linewidth=1, label="rows that decode")
        axis.step(steps, waiting, where="mid", color=COLOURS[1], linewidth=1, label="samples that wait")
        axis.axhline(max_rows, color=INK, linewidth=0.8, linestyle=":", label=f"all {max_rows} rows")
        axis.set_xlabel("decode step")
        axis.set_xlim(0, len(rows))
        axis.set_ylim(0)
        axis.legend(loc="upper right")
        _save(figure, file)


def draw_curves(
    panels: Mapping[str, Mapping[str, Points]], file: Path, what: str = "held-out greedy reward"
) -> None:
    """panels: {title: {name: (step, score)}}, beside each other; a name has one colour in all of them."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4), layout="constrained")
        axes: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        names = list(dict.fromkeys(name for series in panels.values() for name in series))
        palette = mpl.colormaps["tab20"]
        for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
            for name, points in series.items():
                place = names.index(name)
                dashes = "o-" if place % 2 else "o--"
                axis.plot(*zip(*points, strict=True), dashes, color=palette(place % 20), label=name)
            axis.set_title(title)
            axis.set_xlabel("step")
            axis.set_ylim(0, 1.02)
            axis.grid(visible=True)
        axes[0][0].set_ylabel(what)
        drawn = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
        figure.legend(drawn.values(), drawn.keys(), loc="outside right center")
        _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
