"""Draw curves in the terminal or into a file, as `lorad plot` does, and write the page of `lorad report`."""

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import typer

from lorad.cli import candidates, output, table
from lorad.cli.many import only_run
from lorad.cli.options import AsJson
from lorad.cli.selecting import chooses_runs
from lorad.client.choice import AMOUNTS
from lorad.client.client import Client
from lorad.client.histogram import AmountSpread, spreads
from lorad.client.selected import selected
from lorad.errors import Conflict, NotFound, SpecError
from lorad.files import expanded, write_whole
from lorad.records.runs import Run
from lorad.records.samples import Sample
from lorad.selection import Selection
from lorad.tui.curves.plot import LETTERS, CurveLook, extent, names, plot, smoothing
from lorad.tui.curves.series import FACTS, Track

_SIZE = (100, 30)  # where there is no terminal
_NARROWEST = 40  # cells of a chart
_LOWEST = 8
_TALLEST = 26
_AROUND = 4  # lines for the title, the prompt of the shell and what was typed there
_COLORS = ("36", "33", "32", "31", "35", "34")
_ALL = 1 << 60  # steps: none is left out
_BY = {"step": "by step", "tokens": "by tokens sampled", "time": "by time"}


@chooses_runs
def plot_(
    meant: Selection,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            help="Any metric of a step, or eval; several times for several charts. Default: reward, and loss "
            "of runs that have none.",
            autocompletion=candidates.metrics,
        ),
    ] = None,
    x: Annotated[
        Literal["step", "tokens", "time"],
        typer.Option("--x", help="Steps, tokens sampled until then, or time since the run began."),
    ] = "step",
    smooth: Annotated[
        float, typer.Option(help="Weight of the moving average, as TensorBoard has it.", min=0.0, max=0.999)
    ] = 0.0,
    log: Annotated[bool, typer.Option("--log", help="Logarithmic values.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Mark the best point of each curve.")] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", help="Write a file instead: .svg, .csv, or .png, which wants matplotlib."
        ),
    ] = None,
    histogram: Annotated[
        bool,
        typer.Option("--histogram", help="Not curves, but how an amount of the samples of a step is spread."),
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="With --histogram: of this step. Default: the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plot reward (or other metrics) of runs over steps, tokens or time; several runs share the axes.

    With --histogram, --metric is reward, advantage, length (tokens sampled), turns of an episode, or a
    component of the reward, such as reward/judge; by default reward and length. All runs are counted in the
    same ranges, and bars are shares of the samples of their run.
    """
    look = CurveLook(smooth, log, spikes=True, x=x, best=best)
    if histogram and look != CurveLook(0.0, spikes=True, best=False):
        raise SpecError("--x, --smooth, --log and --best are of curves", hint="--histogram draws none.")
    if step is not None and not histogram:
        raise SpecError("--step is of histograms; curves have all steps", hint="Add --histogram.")
    if out is not None:
        from lorad.tui.curves.export import refuse

        refuse(out)
    only_run(meant)
    client = Client()
    runs = _chosen(client, meant)
    if histogram:
        _histograms(client, runs, metric or ["reward", "length"], step, out, as_json=as_json)
        return
    is_whole = as_json or (out is not None and out.lower().endswith(".csv"))
    tracks = tracks_of(client, runs, whole=is_whole)
    metrics = list(dict.fromkeys(metric or [usual_metric(tracks)]))
    _refuse_missing(tracks, metrics)
    if as_json:
        output.print_json([row for metric in metrics for row in _rows(metric, tracks, look)])
    elif not any(_has(track, metric) for track in tracks.values() for metric in metrics):
        output.note("Nothing to plot yet.")
    elif out is not None:
        from lorad.tui.curves.export import write

        output.note(f"Written to {write(out, metrics, tracks, look)}.")
    else:
        print(_text(metrics, tracks, look))


def _histograms(
    client: Client, runs: list[Run], metrics: list[str], step: int | None, out: str | None, *, as_json: bool
) -> None:
    """Count samples of a step of each run, and print or write what `plot --histogram` shows.

    Raises SpecError for a metric that is no amount of samples, NotFound for one that no sample has, and where
    the only run has no samples.
    """
    if unknown := [name for name in metrics if name not in AMOUNTS and not name.startswith("reward/")]:
        hint = f"--histogram takes {', '.join(AMOUNTS)}, and reward/NAME for a component."
        raise SpecError(f"samples have no {unknown[0]}", hint=hint)
    samples = {}
    for run in runs:
        rows = list[Sample]()
        try:
            rows = client.samples(run.name, step=step, limit=_ALL, brief=True)
        except NotFound:
            if len(runs) == 1:
                raise
        if rows:
            samples[run.name] = rows
        else:
            output.note(f"No samples of {run.name}.")
    if not samples:
        return
    charts = {metric: spreads(samples, metric) for metric in dict.fromkeys(metrics)}
    for metric, counted in charts.items():
        if not any(spread.counted for spread in counted):
            components = sorted({name for rows in samples.values() for row in rows for name in row.rewards})
            names = ", ".join(f"reward/{name}" for name in components)
            hint = names and f"There are: {names}."
            raise NotFound(f"no sample of {', '.join(samples)} has a {metric}", hint=hint)
    if as_json:
        output.print_json([spread for counted in charts.values() for spread in counted])
    elif out is not None:
        from lorad.tui.curves.export import write_histograms

        output.note(f"Written to {write_histograms(out, charts, [*samples])}.")
    else:
        width = max(shutil.get_terminal_size(_SIZE).columns, _NARROWEST)
        print(*(line for counted in charts.values() for line in _bars(counted, width)), sep="\n")


def _bars(counted: Sequence[AmountSpread], width: int) -> list[str]:
    """Draw a histogram: a bar for each bin and run, as long as its share of the run's samples."""
    from lorad.tui.curves.bars import title_of

    is_alone = len(counted) == 1
    heads = [] if is_alone else [title_of(counted[0].metric)]
    for place, spread in enumerate(counted):
        mean = "" if spread.mean is None else f", mean {round(spread.mean, 9) + 0.0:.4g}"
        without = spread.samples - spread.counted
        words = f"{spread.samples} samples of step {spread.step}{mean}"
        words += f", {without} without" if without else ""
        run = output.printable(spread.run)
        if is_alone:
            heads.append(f"{run}: {title_of(spread.metric)}, {words}")
        else:
            heads.append(table.styled(f"{LETTERS[place]} {run}: {words}", _color(f"run{place}")))
    ranges = [
        f"{part.low:.6g}" if part.low == part.high else f"{part.low:.6g} to {part.high:.6g}"
        for part in counted[0].bins
    ]
    counts = len(str(max(part.count for spread in counted for part in spread.bins)))
    wide = max(map(len, ranges))
    room = max(width - wide - counts - (3 if is_alone else 5), 1)
    most = max(part.count / spread.counted for spread in counted if spread.counted for part in spread.bins)
    lines = []
    for number, words in enumerate(ranges):
        for place, spread in enumerate(counted):
            count = spread.bins[number].count
            bar = "█" * math.ceil(room * count / max(spread.counted, 1) / most)
            letter = "" if is_alone else f"{LETTERS[place]} "
            start = f"{'' if place else words:>{wide}}  {letter}"
            lines.append(f"{start}{table.styled(bar, _color(f'run{place}'))} {count or ''}".rstrip())
    return [*heads, *lines]


@chooses_runs
def report(
    meant: Selection,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The page, .html; - is stdout.")
    ] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write one HTML page about runs: curves, held-out scores with their intervals, samples, spec, versions
    with what attested them, cost.

    It has no script and loads nothing, so that it can be sent, opened from disk and printed; whatever a model
    or a user wrote stands there as text. Of samples, versions and evaluations it has a choice: a page has
    some 50 KiB for each run, and never over 16 MiB. Of several runs it has all curves over the same axes, and
    what they have otherwise.
    """
    from lorad.cli.commands.report.facts import read
    from lorad.cli.commands.report.page import page

    path = expanded(out).absolute()
    if out != "-":
        if path.suffix.lower() not in (".html", ".htm"):
            raise SpecError(f"{out or 'a name'} does not end with .html", hint="Name it report.html, say.")
        if path.exists() and not force:
            raise Conflict(f"{out} exists", hint="Choose another name, or --force.")
    only_run(meant)
    client = Client()
    names = [run.name for run in _chosen(client, meant)]
    data = page(read(client, names), time.time()).encode()
    if out == "-":
        sys.stdout.buffer.write(data)
        return
    umask = os.umask(0)
    os.umask(umask)
    write_whole(path, data, mode=0o666 & ~umask)
    output.note(f"Written to {path}, {output.size(len(data))}.")


def _chosen(client: Client, meant: Selection) -> list[Run]:
    """Find the runs, in the order in which they were named. Raises NotFound, SpecError for too many."""
    runs = selected(client, meant)
    if not runs:
        raise NotFound("no run is like that", hint="`lorad list` takes the same words.")
    if len(runs) > len(LETTERS):
        hint = "Name fewer of them: --newer 1d, or a narrower glob."
        raise SpecError(f"{len(runs)} runs, and more than {len(LETTERS)} cannot be told apart", hint=hint)
    order = {name: place for place, name in enumerate(meant.names)}
    return sorted(runs, key=lambda run: order.get(run.name, len(order)))


def tracks_of(client: Client, runs: Sequence[Run], *, whole: bool) -> dict[str, Track]:
    """Read the runs, with all their steps or as many as a picture can show."""
    from lorad.tui.curves.series import KEPT
    from lorad.tui.curves.step_reader import read_whole

    return {run.name: read_whole(client, run, _ALL if whole else KEPT) for run in runs}


def usual_metric(tracks: Mapping[str, Track]) -> str:
    """Choose the metric where none is named: the reward, or the loss where no run samples anything."""
    has_rewards = any(_has(track, "reward") for track in tracks.values())
    return "loss" if not has_rewards and any(_has(track, "loss") for track in tracks.values()) else "reward"


def _refuse_missing(tracks: Mapping[str, Track], metrics: Sequence[str]) -> None:
    """Raise NotFound for a metric that none of the runs has; note which runs lack one."""
    begun = {name: track for name, track in tracks.items() if track.steps}
    for metric in metrics:
        without = [name for name, track in begun.items() if not _has(track, metric) and metric != "eval"]
        if without and len(without) == len(begun):
            measured = {name for track in begun.values() for name in (*track.series, *track.sets)}
            hint = f"There are: {', '.join(sorted({'eval', *measured} - {*FACTS}))}."
            raise NotFound(f"{', '.join(without)}: no metric {metric}", hint=hint)
        if without:
            output.note(f"No {metric} in {', '.join(without)}.")


def _has(track: Track, metric: str) -> bool:
    series = track.of(metric)
    return bool(series.xs or series.bad)


def _rows(metric: str, tracks: Mapping[str, Track], look: CurveLook) -> list[dict[str, Any]]:
    """Return the points of each run as JSON has them."""
    rows = []
    for run, track in tracks.items():
        series = track.of(metric)
        row: dict[str, Any] = {"run": run, "metric": metric, "step": list(series.xs)}
        if look.x != "step":
            scale = 1 if look.x == "tokens" else 1000
            row[look.x] = [place / scale for place in track.along(look.x, series.xs)]
        row["value"] = list(series.ys)
        if look.smooth:
            row["smoothed"] = list(series.view(smoothing(metric, track, look), False).ys)
        rows.append(row)
    return rows


# -- in the terminal -----------------------------------------------------------------------------------------
def _text(metrics: Sequence[str], tracks: Mapping[str, Track], look: CurveLook) -> str:
    """Draw the charts of the TUI as wide as the terminal, with a legend for several runs."""
    from lorad.tui.curves.axes import short, x_text
    from lorad.tui.curves.drawing import BEST, dashes, draw

    legend = [
        table.styled(f"{LETTERS[place]} {dashes(place)} {output.printable(run)}", _color(f"run{place}"))
        for place, run in enumerate(tracks if len(tracks) > 1 else ())
    ]
    width, lines = shutil.get_terminal_size(_SIZE)
    height = (lines - _AROUND + 1 - len(legend)) // len(metrics) - 1
    size = max(width, _NARROWEST), min(max(height, _LOWEST), _TALLEST)
    first, last = extent(tracks.values(), look.x) or (0, 0)
    only = f"{output.printable(*tracks)}: " if len(tracks) == 1 else ""
    printed = []
    for metric in metrics:
        drawn, flags = plot(metric, [*tracks.values()], look, first, last)
        bests = [
            f"{BEST} {LETTERS[place] + ' ' if not only else ''}{short(10.0**y if look.log else y)}"
            f" at {x_text(look.x, x)}"
            for x, y, place in reversed(drawn.best)
        ]
        soft = f"ema {look.smooth:g}" if look.smooth else ""
        about = "; ".join(part for part in (soft, flags, *bests) if part)
        printed.append(f"{only}{names(metric)[1]}, {_BY[look.x]}" + (f"; {about}" if about else ""))
        picture = draw(drawn, *size)
        if picture is None:
            printed.append("nothing to draw")
            continue
        for chars, looks in zip(picture.chars, picture.looks, strict=True):
            end = len("".join(chars).rstrip())
            parts = groupby(zip(chars[:end], looks[:end], strict=True), key=lambda cell: _color(cell[1]))
            printed.append(
                "".join(table.styled("".join(c for c, _ in cells), color) for color, cells in parts)
            )
    return "\n".join([*printed, *legend])


def _color(look: str) -> str:
    """Return the SGR code for a look of the picture: each run has its own."""
    kind = look.rstrip("0123456789")
    if kind in ("run", "letter", "best"):
        return _COLORS[int(look.removeprefix(kind)) % len(_COLORS)]
    return {"bad": "31", "grid": "2", "axis": "2", "ground": "2"}.get(kind, "")
