"""The command `lorad check`: what a spec comes to, and whether it would start now. Nothing is queued."""

from typing import Annotated

import typer

from lorad.cli import output
from lorad.cli.checked import said
from lorad.cli.options import AsJson, Overrides, Silent, Spec
from lorad.client import launch
from lorad.client.overrides import from_here
from lorad.client.spec_file import read_spec
from lorad.records.requests import RunRequest


def check(
    spec: Spec,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="The run's name.", show_default=False)] = None,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    """Check a spec as `lorad run` does, and start nothing: model, data, reward, memory and disk, a prompt as
    the model gets it, and whether the run would start at once or what it would wait for.

    `lorad run --dry-run` does the same.
    """
    text, source, cwd = read_spec(spec)
    request = RunRequest(text, source, str(cwd), from_here(overrides or []), name)
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    said(client.check(request), as_json=as_json)
