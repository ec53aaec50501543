"""lorad plot RUN…: curves in the terminal, or as PNG."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from lorad.cli import candidates
from lorad.cli.options import AsJson
from lorad.cli.output import note, print_json
from lorad.client.client import Client
from lorad.errors import NotFound, SpecError

app = typer.Typer(add_completion=False)

Curves = dict[str, tuple[list[float], list[float]]]


@app.command()
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
    curves = {run: curve(client, run, metric) for run in runs}
    if as_json:
        print_json([{"run": run, "metric": metric, "step": x, "value": y} for run, (x, y) in curves.items()])
    elif not any(x for x, _ in curves.values()):
        note("Nothing to plot yet.")
    elif png is None:
        print(text_plot(curves, metric))
    else:
        png_plot(curves, metric, png)
        note(f"Written to {png}.")


def curve(client: Client, run: str, metric: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the surviving lineage. Raises NotFound with the metrics that exist."""
    if metric == "eval":
        points: list[tuple[float, Any]] = [(e.step, e.score) for e in client.evals(run)]
    else:
        steps = client.steps(run)
        measured = {name for step in steps for name in step.metrics}  # none of them in each step
        if steps and metric not in measured:
            known = ", ".join(["eval", *sorted(measured)])
            raise NotFound(f"{run} has no metric {metric}", hint=f"It has: {known}.")
        points = [(s.step, s.metrics.get(metric)) for s in steps]
    finite = [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]
    return [x for x, _ in finite], [y for _, y in finite]


def text_plot(curves: Curves, metric: str) -> str:
    """Braille curves as wide as the terminal."""
    import plotille

    columns, lines = shutil.get_terminal_size((100, 30))
    figure = plotille.Figure()
    figure.width, figure.height = max(min(columns - 24, 120), 20), max(min(lines - 12, 24), 6)
    figure.x_label, figure.y_label = "step", metric
    figure.color_mode = "names"
    figure.set_x_limits(min_=0)
    figure.register_label_formatter(
        float, lambda v, chars, delta, left=False: f"{v:{'<' if left else '>'}{chars}.3g}"
    )
    colors = ("green", "blue", "yellow", "magenta", "cyan", "red")
    for i, (run, (x, y)) in enumerate(curves.items()):
        if x:
            figure.plot(x, y, lc=colors[i % len(colors)], label=run)
    return str(figure.show(legend=True))


def png_plot(curves: Curves, metric: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, (x, y) in curves.items():
        axes.plot(x, y, label=run, linewidth=1.6)
    axes.set(xlabel="step", ylabel=metric, title=f"{metric} over steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)
