"""lorad generate ALIAS|RUN@12 "prompt": try a version."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.launch import connected
from lorad.cli.options import AsJson
from lorad.cli.output import print_json, printable
from lorad.client.requests import Sampling

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    version: Annotated[
        str,
        typer.Argument(
            metavar="ALIAS|RUN[@N]",
            help="A run's name means its current version.",
            show_default=False,
            autocompletion=candidates.versions,
        ),
    ],
    prompt: Annotated[str, typer.Argument(show_default=False)],
    n: Annotated[int, typer.Option("-n", help="How many completions.", min=1, max=1024)] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt with a version; its pool is started if it is not warm."""
    sampling = Sampling(n, temperature, top_p, top_k, max_new_tokens, seed)
    answer = connected().generate(version, prompt, sampling)
    if as_json:
        print_json(answer)
        return
    for completion in answer.completions:
        print(printable(completion.text))
