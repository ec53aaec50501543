"""The command `lorad sweep`: a run for each combination of values, and halving that stops the worse ones."""

from pathlib import Path
from typing import Annotated

import typer

from lorad.cli import candidates, output
from lorad.cli.options import AsJson, Detach, Silent
from lorad.cli.points import points_in
from lorad.cli.sweeps import follow, show, summary, write_svg
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.overrides import from_here, read_spec
from lorad.errors import SpecError
from lorad.records.requests import HalvingRequest, PointsRequest


def sweep(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="SPEC", help="A YAML file, or - for stdin.", autocompletion=candidates.specs),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=A,B,…]…",
            help="Keys with several values span the grid: trainer.lr=1e-4,3e-4",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option("--random", metavar="N", help="Draw N points: trainer.lr=loguniform(1e-5,1e-3).", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws: the same seed, the same points.", min=0)] = 0,
    points: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Points to run: a .csv with keys as header, .json or .yaml list."),
    ] = None,
    halving: Annotated[bool, typer.Option("--halving", help="Stop the worse runs at each rung.")] = False,
    asha: Annotated[
        bool, typer.Option("--asha", help="The same for each run as it comes to a rung; nobody waits.")
    ] = False,
    min_steps: Annotated[
        int | None, typer.Option(help="The first rung; each is ETA times the one before.", min=1)
    ] = None,
    eta: Annotated[float | None, typer.Option(help="A rung keeps one run in ETA; default: 2.")] = None,
    rungs: Annotated[
        str | None, typer.Option(metavar="10,20", help="Their steps; default: trainer.steps / ETA^k.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="eval|nll|reward|loss", help="What ranks; default: the first that all have."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Runs are NAME-1, NAME-2, …")] = None,
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
    svg: Annotated[
        Path | None,
        typer.Option(help="Write a picture: a line for each run through its values and its score."),
    ] = None,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    r"""Start a run for each point of a grid, all on one warm base, and follow them. Ctrl-C detaches; they
    continue. A table at the end has the best first: last and best eval, mean reward of the last five steps.

    `lorad sweep spec.yaml trainer.lr=1e-4,3e-4 seed=1,2,3 --halving`. Instead of a grid, `--random 12` draws
    points from uniform(a,b), loguniform(a,b), int(a,b), logint(a,b) and choice(a,b,…), quoted for the shell:
    `lorad sweep spec.yaml "trainer.lr=loguniform(1e-5,1e-3)" lora.rank=8,16,32 --random 12`. Lists go into
    brackets, as a comma separates values: lora.target_modules=\[q_proj,v_proj],\[all-linear].
    """
    if detach and wait:
        raise SpecError("--detach returns at once and --wait at the end", hint="Give one of the two.")
    if listed:
        if markdown and spec is None:
            raise SpecError("--markdown prints one sweep", hint="`lorad sweep --list NAME --markdown`.")
        if svg is not None and spec is None:
            raise SpecError("--svg draws one sweep", hint="`lorad sweep --list NAME --svg FILE`.")
        sweeps = Client().sweeps(spec)
        show(sweeps, in_full=spec is not None, as_json=as_json, markdown=markdown)
        if svg is not None:
            write_svg(sweeps[0], svg)
        return
    if spec is None:
        hint = "`lorad sweep spec.yaml trainer.lr=1e-4,3e-4`, or --list."
        raise SpecError("a sweep begins with a spec", hint=hint)
    text, source, cwd = read_spec(spec)
    wish = _halving(halving, eta, rungs, metric, asha=asha, min_steps=min_steps)
    if points is not None and random is not None:
        raise SpecError("--points names the points, --random draws them", hint="Give one of the two.")
    listed_points = [] if points is None else [from_here(point) for point in points_in(points)]
    chosen = PointsRequest(random, seed, listed_points)
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    changed = from_here(overrides or [])
    started = client.sweep(
        text, source=source, cwd=str(cwd), overrides=changed, name=name, halving=wish, points=chosen
    )
    for warning in started.warnings:
        output.note(f"warning: {warning}")
    if detach or (as_json and not wait):
        output.note_or_json(started, summary(started), as_json=as_json)
        return
    _follow(client, started.sweep, svg, as_json=as_json, markdown=markdown)


def _follow(client: Client, name: str, svg: Path | None, *, as_json: bool, markdown: bool) -> None:
    """Follow a sweep to its end and show its table. The exit code is 1 where no run completed."""
    over = follow(client, name, quiet=as_json)
    if over is None:  # the user detached
        return
    show([over], in_full=True, as_json=as_json, markdown=markdown)
    if svg is not None:
        write_svg(over, svg)
    if all(run.reason != "completed" for run in over.runs):
        raise typer.Exit(1)


def _halving(
    halving: bool, eta: float | None, rungs: str | None, metric: str | None, asha: bool, min_steps: int | None
) -> HalvingRequest | None:
    """Read the options of halving. Raises SpecError."""
    if halving and asha:
        hint = "Give one of the two."
        raise SpecError("--halving waits for all runs at a rung, --asha for none", hint=hint)
    if not (halving or asha) and (eta, rungs, metric, min_steps) == (None,) * 4:
        return None
    try:
        steps = None if rungs is None else [int(rung) for rung in rungs.split(",")]
    except ValueError:
        raise SpecError(f"--rungs {rungs}: not numbers of steps", hint="For example --rungs 10,20.") from None
    return HalvingRequest(eta, steps, metric, asha, min_steps)
