"""lorad report RUN…: one HTML page to share instead of a picture."""

import os
import sys
import time
from typing import Annotated

import typer

from lorad.cli import output
from lorad.cli.commands.plot import chosen_in_order
from lorad.cli.many import only_run
from lorad.cli.selecting import chooses_runs
from lorad.client.client import Client
from lorad.errors import Conflict, SpecError
from lorad.files import expanded, write_whole
from lorad.selection import Selection
from lorad.text import size


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
    from lorad.cli.report.facts import read
    from lorad.cli.report.page import page

    path = expanded(out).absolute()
    if out != "-":
        if path.suffix.lower() not in (".html", ".htm"):
            raise SpecError(f"{out or 'a name'} does not end with .html", hint="Name it report.html, say.")
        if path.exists() and not force:
            raise Conflict(f"{out} exists", hint="Choose another name, or --force.")
    only_run(meant)
    client = Client()
    names = [run.name for run in chosen_in_order(client, meant)]
    data = page(read(client, names), time.time()).encode()
    if out == "-":
        sys.stdout.buffer.write(data)
        return
    umask = os.umask(0)
    os.umask(umask)
    write_whole(path, data, mode=0o666 & ~umask)
    output.note(f"Written to {path}, {size(len(data))}.")
