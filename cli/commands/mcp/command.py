"""The command `lorad mcp`: answers an agent on standard input and output."""

import os
from typing import Annotated

import typer

from lorad.box.paths import Home, default_home
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.files import expanded
from lorad.selection import in_commas

_TIMEOUT = 60.0  # seconds, as clients have


def mcp(
    home: Annotated[str | None, typer.Option(metavar="DIR", help="The home, as LORAD_HOME.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERB,…",
            help="What the agent may do: run, sweep, fork, resume, pause, stop, kill, edit, tag, note; code.",
        ),
    ] = None,
    base: Annotated[
        str, typer.Option(metavar="DIR", help="Files of its specs lie below it; relative ones begin there.")
    ] = ".",
    most_runs: Annotated[int, typer.Option(help="Runs of agents that may be unfinished.", min=1)] = 8,
    device_hours: Annotated[
        float | None, typer.Option(help="Device-hours after which it starts no more.", min=0)
    ] = None,
    any_run: Annotated[
        bool, typer.Option("--any-run", help="Verbs may be about runs that no agent started.")
    ] = False,
) -> None:
    """Serve lorad's tools to an agent by the Model Context Protocol, on standard input and output. Its
    program starts the command: `claude mcp add lorad -- lorad mcp --home DIR`.

    Without --allow the agent can only read. What it starts gets the tag mcp, and verbs are for such runs
    alone. Without `code` among what is allowed, specs name no interpreters, addresses, keys, loggers and
    receivers, and no files outside of --base; the Python files below it run as you.
    """
    from lorad.cli.commands.mcp.bounds import CODE, VERBS, AgentBounds

    words = frozenset(in_commas(allow))
    if unknown := sorted(words - {*VERBS, CODE}):
        hint = f"Verbs are {', '.join(VERBS)}, and {CODE}."
        raise SpecError(f"--allow {unknown[0]}: there is no such verb", hint=hint)
    directory = expanded(base).absolute().resolve()
    if not directory.is_dir():
        raise SpecError(f"--base {base}: not a directory", hint="Name the directory of your specs.")
    if home is not None:  # what this process starts has it, too
        os.environ["LORAD_HOME"] = str(expanded(home).absolute())
    try:
        from lorad.cli.commands.mcp.server import make_server
    except ModuleNotFoundError as error:
        hint = "Install it: pip install 'lorad[mcp]'."
        raise SpecError(f"the package {error.name} is not here, which `lorad mcp` needs", hint=hint) from None
    client = Client(Home(default_home()), timeout=_TIMEOUT)
    bounds = AgentBounds(words, directory, most_runs, device_hours, any_run)
    make_server(client, bounds).run("stdio")
