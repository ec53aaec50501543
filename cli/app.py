"""`lorad`: finds the verb, imports its file, turns errors into messages and exit codes.

Exit codes: 0 done, 1 the run or command failed, 2 bad usage or spec, 3 no such run, 4 not allowed, 5 daemon
unreachable.
"""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lorad.startup import quick_imports

with quick_imports():
    import typer
    from typer.core import TyperCommand, TyperGroup
    from typer.main import get_command as build

    from lorad import __version__
    from lorad.cli.complete import VARIABLE, answer
    from lorad.cli.output import print_error, watch_versions
    from lorad.errors import LoradError, SpecError, StorageError

COMMANDS = (
    *("run", "list", "show", "logs", "resume", "pause", "stop", "kill", "rm"),
    *("sweep", "fork", "adapters", "checkpoints", "export", "verify", "samples", "plot"),
    *("pin", "unpin", "swap", "aliases", "serve", "generate", "pools", "devices", "gc"),
    *("top", "tui", "daemon", "doctor", "init", "completion"),
)


class LazyGroup(TyperGroup):
    """Knows every verb by name and imports one only to run it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as click does, but suggest the nearest verbs for an unknown one."""
        verb = args[0]
        if verb in COMMANDS or ctx.resilient_parsing or verb.startswith("-"):
            return super().resolve_command(ctx, args)
        near = get_close_matches(verb, COMMANDS) or [name for name in COMMANDS if name.startswith(verb)]
        hint = f"Did you mean {' or '.join(near)}?" if near else "`lorad --help` lists all commands."
        raise SpecError(f"there is no command {verb}", hint=hint)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Every verb with the words that its file begins with: none is imported."""
        from typer._click.shell_completion import CompletionItem

        if ctx._protected_args or ctx.args:  # of a verb that there is not
            return []
        folder = Path(__file__).parent / "commands"
        found = [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]
        for item in found:
            with (folder / f"{item.value}.py").open() as file:
                item.help = file.readline().partition(": ")[2].strip('."\n')
        return [*found, *TyperCommand.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        with quick_imports():
            module = importlib.import_module(f"lorad.cli.commands.{cmd_name}")
        watch_versions()
        command = build(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def lorad(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    """LoRA reinforcement learning on a shared box: runs, adapter versions and checkpoints that survive
    anything.
    """
    if version:
        print(f"lorad {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


def main() -> None:
    """The console script."""
    if shell := os.environ.pop(VARIABLE, ""):
        answer(shell, build(app))
        return
    try:
        app()
    except LoradError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # of a file that was named, or of the home
        print_error(StorageError(f"{error.filename or 'lorad'}: {error.strerror or error}"))
        sys.exit(1)
