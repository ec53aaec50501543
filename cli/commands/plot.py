"""lorad plot RUN…: curves in the terminal, or as PNG."""

import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated

import typer

from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson
from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from lorad.tui.curves.series import Series

_SIZE = (100, 30)  # where there is no terminal
_NARROWEST, _LOWEST, _TALLEST = 40, 8, 26  # cells of the chart
_AROUND = 4  # lines for the title, the prompt of the shell and what was typed there
_COLORS = ("36", "33", "32", "31", "35", "34")


def plot(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", show_default=False, autocompletion=candidates.runs)
    ],
    metric: Annotated[
        str,
        typer.Option(
            "--metric", "-m", help="Any metric of a step, or eval.", autocompletion=candidates.metrics
        ),
    ] = "reward",
    png: Annotated[Path | None, typer.Option(help="Write a picture instead.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Plot reward (or another metric) over steps; several runs share the axes."""
    if png is not None and png.suffix.lower() != ".png":
        raise SpecError(f"{png}: --png writes PNG alone", hint=f"Name it {png.with_suffix('.png')}.")
    client = Client()
    found = {run: _series(client, run, metric) for run in runs}
    if as_json:
        curves = [(run, list(series.xs), list(series.ys)) for run, series in found.items()]
        output.print_json([{"run": run, "metric": metric, "step": xs, "value": ys} for run, xs, ys in curves])
    elif not any(series.xs for series in found.values()):
        output.note("Nothing to plot yet.")
    elif png is None:
        print(_text_plot(found, metric))
    else:
        _png_plot(found, metric, png)
        output.note(f"Written to {png}.")


def _series(client: Client, run: str, metric: str) -> Series:
    """Return a metric over the steps that count. Raises NotFound with the metrics that exist."""
    series = Series()
    evals = client.evals(run) if metric.partition("/")[0] == "eval" or metric in ("nll", "accuracy") else []
    if metric == "eval" or any(metric in evaluation.figures for evaluation in evals):
        for evaluation in evals:
            if metric in evaluation.figures or metric == "eval":
                series.add(evaluation.step, evaluation.figures.get(metric))
        return series
    steps = client.steps(run)
    measured = {name for step in steps for name in step.metrics}  # not each step has all of them
    if steps and metric not in measured:
        known = ", ".join(["eval", *sorted(measured)])
        raise NotFound(f"{run} has no metric {metric}", hint=f"It has: {known}.")
    for step in steps:
        if metric in step.metrics:
            series.add(step.step, step.metrics[metric])
    return series


def _text_plot(found: Mapping[str, Series], metric: str) -> str:
    """Draw the chart of the TUI's curves, as wide as the terminal, with a legend where there are several."""
    from lorad.tui.curves.drawing import Curve, Plot, dashes, draw
    from lorad.tui.curves.plot import names

    letters = [ascii_uppercase[place % 26] for place in range(len(found))] if len(found) > 1 else [""]
    curves = [
        Curve(series.xs, series.ys, place, letters[place]) for place, series in enumerate(found.values())
    ]
    marked = curves if metric == "eval" and len(curves) == 1 else []
    marks = [point for curve in marked for point in zip(curve.xs, curve.ys, strict=True)]
    steps = [step for curve in curves for step in (*curve.xs[:1], *curve.xs[-1:])]
    bad = sorted({step for series in found.values() for step in series.bad})
    chart = Plot(curves[::-1], min(steps), max(steps), marks, bad, spikes=True)
    legend = [
        table.styled(f"{letters[place]} {dashes(place)} {output.printable(run)}", _color(f"run{place}"))
        for place, run in enumerate(found if len(found) > 1 else ())
    ]
    width, lines = shutil.get_terminal_size(_SIZE)
    picture = draw(chart, max(width, _NARROWEST), min(max(lines - _AROUND - len(legend), _LOWEST), _TALLEST))
    assert picture is not None  # there is a point, and room for it
    one = "" if legend else f"{output.printable(*found)}: "
    title = f"{one}{names(metric)[1]}, by step" + (f"; {len(bad)} without a number" if bad else "")
    rows = (_line(chars, looks) for chars, looks in zip(picture.chars, picture.looks, strict=True))
    return "\n".join([title, *rows, *legend])


def _line(chars: list[str], looks: list[str]) -> str:
    """Return a row of the picture, coloured where stdout is a terminal that can."""
    end = len("".join(chars).rstrip())
    parts = groupby(zip(chars[:end], looks[:end], strict=True), key=lambda cell: _color(cell[1]))
    return "".join(table.styled("".join(char for char, _ in cells), color) for color, cells in parts)


def _color(look: str) -> str:
    """Return the SGR code for a look of the picture: each run has its own."""
    kind, place = look.rstrip("0123456789"), look.lstrip("abcdefghijklmnopqrstuvwxyz")
    if kind in ("run", "letter"):
        return _COLORS[int(place) % len(_COLORS)]
    return {"bad": "31", "grid": "2", "axis": "2"}.get(kind, "")


def _png_plot(found: Mapping[str, Series], metric: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, series in found.items():
        axes.plot(series.xs, series.ys, label=run, linewidth=1.6)
    axes.set(xlabel="step", ylabel=metric, title=f"{metric} over steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)
