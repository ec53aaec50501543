"""The commands edit and groups: what queued runs ask for, and how many of a group work at a time."""

import sys
from typing import Annotated

import typer

from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson
from lorad.cli.options import Run as RunName
from lorad.client import launch
from lorad.client.client import Client
from lorad.errors import LoradError, SpecError
from lorad.records.runs import RunGroup

_GROUPS = table.columns("group, limit, working, queued, owner 1")


def edit(
    run: RunName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE…",
            help="resources.*, or trainer.steps of a run that has not begun.",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change what a queued run asks for: `lorad edit sorter resources.priority=2`. What it trains stays.

    Without KEY=VALUE, on a terminal, it opens these keys in $VISUAL, $EDITOR or vi. A text that is refused is
    kept in its file.
    """
    client = launch.connected()
    if overrides or not (sys.stdin.isatty() and sys.stdout.isatty()):
        changed = client.edit(run, overrides or [])
    else:
        from lorad.cli.commands.marks.editor import read_edits, write_draft

        before = client.show(run)
        path = write_draft(before)
        while True:  # until the daemon takes it, or the user gives up
            try:
                changes = read_edits(path, before)
                changed = client.edit(run, changes) if changes else before
                break
            except LoradError as error:
                output.print_error(error)
                output.note(f"Your text is in {path}.")
                if isinstance(error, SpecError) and typer.confirm("Open it again?", default=True, err=True):
                    continue
                raise typer.Exit(error.exit_code) from None
        path.unlink()
        if not changes:
            output.note("Nothing was changed.")
    if as_json:
        output.print_json(changed)
        return
    waits = f": {changed.waiting}" if changed.waiting else ""
    output.note(f"{run} is {changed.state}, with priority {changed.priority}{waits}.")


def groups(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A group of yours.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="So many of its runs work at a time; 0 holds them.", min=0)
    ] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Any number of them may work.")] = False,
    as_json: AsJson = False,
) -> None:
    """List groups of runs, or set how many runs of one work at a time; more than that wait in the queue.

    A run is of a group by its spec: `lorad run spec.yaml resources.group=night`, or `lorad edit RUN
    resources.group=night` while it waits. Then `lorad groups night --limit 2`.
    """
    if limit is not None and no_limit:
        raise SpecError("--limit and --no-limit contradict each other", hint="Give one of the two.")
    if name is None:
        if limit is not None or no_limit:
            raise SpecError("which group?", hint="`lorad groups NAME --limit 2`.")
        _show(Client().groups(), as_json)
        return
    if limit is None and not no_limit:
        _show([group for group in Client().groups() if group.name == name], as_json)
        return
    _show([launch.connected().limit_group(name, limit)], as_json)


def _show(groups: list[RunGroup], as_json: bool) -> None:
    rows = ((g.name, "none" if g.limit is None else g.limit, g.working, g.queued, g.owner) for g in groups)
    empty = "No groups. `lorad run … resources.group=NAME` makes one."
    output.table_or_json(groups, _GROUPS, rows, empty=empty, as_json=as_json)
