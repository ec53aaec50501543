"""The commands metrics and log-metrics: all figures of a run, as files or in a logger."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lorad.cli import output, table
from lorad.cli.options import AsJson, Run
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.records.metrics import metric_of

_ABOUT = ("step", "attempt", "at", "version")
_Row = dict[str, Any]


def metrics(
    run: Run,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all of them as CSV.")] = False,
    parquet: Annotated[Path | None, typer.Option(help="Write them to this file.")] = None,
    long: Annotated[bool, typer.Option("--long", help="One row a metric instead of one a step.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a run measured: a line for each metric, or all values as CSV, JSON or Parquet.

    One row a step, with the evaluation at that step as `eval`, and `eval/NAME` of a set; steps that a resume
    took back are left out. A metric that was not measured is empty, one that was not finite is nan.
    """
    from lorad.api.waiting import pages

    client = Client()
    by_step: dict[int, _Row] = {}
    for step in pages(client, run):
        values = {name: float("nan") if value is None else value for name, value in step.metrics.items()}
        by_step[step.step] = {key: getattr(step, key) for key in _ABOUT} | values
    for evaluation in client.evals(run):
        row = by_step.setdefault(evaluation.step, {key: getattr(evaluation, key) for key in _ABOUT})
        row |= {name: v for name, v in evaluation.figures.items() if name.startswith("eval")}
    rows = [by_step[step] for step in sorted(by_step)]
    if parquet is None and not as_csv and not as_json:
        _print_summary(rows)
        return
    shown = rows
    if long:
        shown = [
            {key: row[key] for key in _ABOUT} | {"metric": name, "value": value}
            for row in rows
            for name, value in row.items()
            if name not in _ABOUT
        ]
    if parquet is not None:
        import pyarrow
        from pyarrow.parquet import write_table

        columns = {name: [row.get(name) for row in shown] for name in _columns(shown)}
        write_table(pyarrow.table(columns), parquet)
        output.note(f"Written to {parquet}.")
    if as_csv:
        writer = csv.DictWriter(sys.stdout, _columns(shown), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(shown)
    elif as_json:
        # JSON has no word for what is not a number
        output.print_json([{key: None if v != v else v for key, v in row.items()} for row in shown])


def log_metrics(
    run: Run,
    place: Annotated[
        str | None, typer.Argument(metavar="[PLACE]", help="A directory, or MLflow's URI.")
    ] = None,
    to: Annotated[
        str, typer.Option("--to", help="tensorboard, wandb, mlflow, or a plug-in.", show_default=False)
    ] = "tensorboard",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the logger.")
    ] = None,
) -> None:
    """Write all figures of a run to a logger, also when it ended long ago.

    Repeating it changes nothing. docs/loggers.md has the settings.
    """
    from lorad.box.paths import Home, RunDir, default_home
    from lorad.loggers.export import chosen, write_all

    values = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"--set {text}: it is KEY=VALUE", hint="For example --set project=lorad.")
        values[key] = value
    choice = chosen(to, place, values)
    home = Home(default_home())
    files = home.root if home.shared_by is None else Path("~/lorad").expanduser()
    write_all(RunDir(Path(Client().show(run).directory)), choice, files)
    output.note(f"All of {run} is in {to}.")


def _columns(rows: list[_Row]) -> list[str]:
    """List all columns: first what a row is about, then the metrics by name."""
    names = {name: None for row in rows for name in row}
    return [*_ABOUT, *sorted(name for name in names if name not in _ABOUT)]


def _print_summary(rows: list[_Row]) -> None:
    cells = []
    for name in _columns(rows)[len(_ABOUT) :]:
        values = [row[name] for row in rows if name in row and row[name] == row[name]]
        ends = (values[0], values[-1], min(values), max(values)) if values else ()
        metric = metric_of(name)
        figures = [f"{value:.4g}" for value in ends] or [""] * 4
        cells.append([name, str(len(values)), *figures, "" if metric is None else metric.title])
    columns = table.columns("metric, steps 2, first, last, min 1, max 1, what it is 3")
    output.print_table(columns, cells, empty="Nothing was measured yet.")
