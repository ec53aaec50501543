"""lorad init [FILE]: a spec to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorad.cli.output import note
from lorad.errors import Conflict, SpecError
from lorad.spec.templates import SMALL, TEMPLATES

app = typer.Typer(add_completion=False)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="The base model.", show_default=SMALL.model)] = None,
    data: Annotated[str | None, typer.Option(help="The training data.", show_default=SMALL.data)] = None,
    template: Annotated[str, typer.Option(help=f"One of: {', '.join(TEMPLATES)}.")] = SMALL.name,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a small spec; every key that it leaves out has a default."""
    if template not in TEMPLATES:
        told = "; ".join(f"{one.name}: {one.says}" for one in TEMPLATES.values())
        raise SpecError(f"there is no template {template}", hint=f"There are {told}.")
    if file.exists() and not force:
        raise Conflict(f"{file} exists", hint="Choose another name, or --force.")
    file.write_text(TEMPLATES[template].filled(str(file), model=model, data=data))
    note(f"Wrote {file}. Start it with `lorad run {file}`.")
