"""lorad sweep SPEC key=a,b: a run for each combination of values, and halving that stops the worse ones
early.
"""

from typing import Annotated

import typer

from lorad.cli import candidates, output
from lorad.cli.options import AsJson, Detach, refuse_both
from lorad.cli.sweeps import follow, show, summary
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.overrides import from_here
from lorad.client.requests import HalvingRequest
from lorad.client.spec_file import read_spec
from lorad.errors import SpecError


def sweep(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC",
            help="A YAML file, or - for stdin.",
            show_default=False,
            autocompletion=candidates.specs,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=A,B,…]…",
            help="Keys with several values span the grid: trainer.lr=1e-4,3e-4",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    halving: Annotated[bool, typer.Option("--halving", help="Stop the worse runs at each rung.")] = False,
    eta: Annotated[
        float | None, typer.Option(help="A rung keeps one run in ETA; default: 2.", show_default=False)
    ] = None,
    rungs: Annotated[
        str | None, typer.Option(metavar="10,20", help="Their steps; default: trainer.steps / ETA^k.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="eval|nll|reward|loss", help="What ranks; default: the first that all have."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Runs are NAME-1, NAME-2, …", show_default=False)] = None,
    detach: Detach = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when all are over (also with --json).")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Show all sweeps, or the one that is named in place of SPEC.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of one sweep as Markdown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    r"""Start a run for each point of a grid, all on one warm base, and follow them. Ctrl-C detaches; they
    continue. A table at the end has the best first: last and best eval, mean reward of the last five steps.

    `lorad sweep spec.yaml trainer.lr=1e-4,3e-4 seed=1,2,3 --halving`. Lists go into brackets, as a comma
    separates values: lora.target_modules=\[q_proj,v_proj],\[all-linear].
    """
    refuse_both(detach, wait)
    if listed:
        if markdown and spec is None:
            raise SpecError("--markdown prints one sweep", hint="`lorad sweep --list NAME --markdown`.")
        show(Client().sweeps(spec), one=spec is not None, as_json=as_json, markdown=markdown)
        return
    if spec is None:
        raise SpecError(
            "a sweep begins with a spec", hint="`lorad sweep spec.yaml trainer.lr=1e-4,3e-4`, or --list."
        )
    text, source, cwd = read_spec(spec)
    wish = _wished(halving, eta, rungs, metric)
    client = launch.connected()
    started = client.sweep(
        text, source=source, cwd=str(cwd), overrides=from_here(overrides or []), name=name, halving=wish
    )
    for warning in started.warnings:
        output.note(f"warning: {warning}")
    if detach or (as_json and not wait):
        output.print_json(started) if as_json else output.note(summary(started))
        return
    over = follow(client, started.sweep, quiet=as_json)
    if over is None:  # the user detached
        return
    show([over], one=True, as_json=as_json, markdown=markdown)
    if all(run.reason != "completed" for run in over.runs):
        raise typer.Exit(1)


def _wished(halving: bool, eta: float | None, rungs: str | None, metric: str | None) -> HalvingRequest | None:
    """Read the options of halving. Raises SpecError."""
    if not halving and eta is None and rungs is None and metric is None:
        return None
    try:
        steps = None if rungs is None else [int(rung) for rung in rungs.split(",")]
    except ValueError:
        raise SpecError(f"--rungs {rungs}: not numbers of steps", hint="For example --rungs 10,20.") from None
    return HalvingRequest(eta, steps, metric)
