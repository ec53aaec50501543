"""lorad completion SHELL: a script to source."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(show_default=False)]) -> None:
    """Print it: `source <(lorad completion bash)`."""
    from typer._completion_shared import get_completion_script

    print(get_completion_script(prog_name="lorad", complete_var="_LORAD_COMPLETE", shell=shell.value))
