"""The commands checkpoints, verify and gc: what lies on disk, is it sound, and what can be deleted."""

from typing import Annotated

import typer

from lorad.cli.options import AsJson, Run
from lorad.cli.output import age, note, print_json, print_table, printable, size, table_or_json
from lorad.cli.table import columns
from lorad.client.client import Client

_CHECKPOINTS = columns("step, version, size 1, age 2, path whole")
_DELETED = columns("run, size, why fold, path whole")
_VERIFY_SECONDS = 24 * 3600.0


def checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List checkpoints, oldest first."""
    saved = Client().checkpoints(run)
    rows = ((c.step, f"@{c.version}", size(c.bytes), age(c.created_at), c.path) for c in saved)
    table_or_json(saved, _CHECKPOINTS, rows, empty="No checkpoints yet.", as_json=as_json)


def verify(run: Run, as_json: AsJson = False) -> None:
    """Hash the base, versions, checkpoints, samples and journal again, audit the run,
    attest what is loaded.
    """
    answer = Client(timeout=_VERIFY_SECONDS).verify(run)
    if as_json:
        print_json(answer)
    for check in [] if as_json else answer.checks:
        mark = "\N{BALLOT X}" if check.problems else "\N{CHECK MARK}"
        print(f"{mark} {printable(check.check):<12} {printable(check.looked_at)}")
        for problem in check.problems:
            print(f"    {printable(problem)}")
    if answer.problems:
        raise typer.Exit(1)


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what no run, pin, alias or checkpoint needs, by the `checkpoint` section of each run's spec."""
    answer = Client().gc(dry_run=dry_run)
    if as_json:
        print_json(answer)
        return
    rows = [(item.run, size(item.bytes), item.why, item.path) for item in answer.deleted]
    print_table(_DELETED, rows, empty="There is nothing to delete.")
    for version in answer.kept:
        note(f"{version.version} is kept: `lorad swap {version.alias} --rollback` goes back to it.")
    if rows:
        note(f"{size(answer.bytes)} {'would be' if dry_run else 'are'} free.")
