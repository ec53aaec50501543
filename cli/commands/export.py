"""lorad export RUN@12 DIR: a version as a PEFT directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.options import AsJson
from lorad.cli.output import note, print_json
from lorad.client.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def export(
    version: Annotated[
        str, typer.Argument(metavar="RUN@N", show_default=False, autocompletion=candidates.versions)
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Copy a version, verified, into a directory that PEFT, SGLang and vLLM load."""
    answer = Client().export(version, str(directory.expanduser().absolute()))
    print_json(answer) if as_json else note(f"{answer.version} is in {answer.path} (sha256 {answer.sha256}).")
