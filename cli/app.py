"""Runs `lorad`: finds the verb, imports its module alone, turns errors into messages and exit codes.

Exit codes: 0 done, 1 the run or command failed, 2 bad usage or spec, 3 no such run, 4 not allowed, 5 daemon
unreachable.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from lorad.startup import quick_imports

with quick_imports():
    import typer
    from typer._click.exceptions import BadOptionUsage, NoArgsIsHelpError, NoSuchOption, UsageError
    from typer.core import TyperCommand, TyperGroup
    from typer.main import get_command as build

    from lorad import __version__
    from lorad.box.paths import give_home
    from lorad.cli.complete import VARIABLE, answer
    from lorad.cli.output import hook_transport, print_error
    from lorad.cli.streams import give_up_streams, settle_streams
    from lorad.errors import LoradError, SpecError, StorageError


class _Command(NamedTuple):
    """A command of `lorad`.

    place: `module:name` inside lorad.cli.commands: a function, or a Typer with commands of its own.
    about: what a shell and `lorad --help` show beside the name.
    """

    place: str
    about: str


# By the panels of `lorad --help`; in each as a user meets them.
_PANELS = {
    "Runs": {
        "spec": ("specs.keys:spec", "keys of the spec, and its JSON Schema for editors"),
        "check": ("specs.check:check", "a spec alone: what it comes to, and when it would start"),
        "try": ("episodes:try_", "a few episodes or samples of a spec, before it is queued"),
        "run": ("run:run", "check a spec, start a run, follow it"),
        "job": ("specs.job:job", "a run with a daemon of its own, for Slurm, Ray and other schedulers"),
        "sweep": (
            "sweep:sweep",
            "a run for each combination of values, and halving that stops the worse ones early",
        ),
        "edit": ("marks.queued:edit", "change what a queued run asks for"),
        "groups": ("marks.queued:groups", "how many runs of a group work at a time"),
        "pause": ("control:pause", "interrupt runs after this step"),
        "resume": ("run:resume", "continue from a checkpoint"),
        "stop": ("control:stop", "end runs after this step"),
        "kill": ("control:kill", "end runs at once"),
        "wait": ("control:wait", "until runs are over, or have a figure: --metric 'eval>0.9'"),
        "fork": ("run:fork", "start a new run from a version of another one"),
        "tag": ("marks.labels:tag_app", "words of yours on a run"),
        "note": ("marks.labels:note", "a sentence of yours on a run"),
        "rename": ("marks.labels:rename", "another name for a run"),
        "rm": ("control:rm", "delete runs that are over"),
    },
    "Look": {
        "list": ("list:list_", "runs, and why they wait"),
        "show": ("show:show", "everything about a run"),
        "attach": ("run:attach", "follow a run as `lorad run` does"),
        "logs": ("logs:logs", "what processes of a run print, or the daemon, or the gateway"),
        "samples": ("samples:samples", "what the model wrote"),
        "plot": ("plot:plot_", "curves in the terminal, or as PNG, SVG, CSV"),
        "why": ("show:why", "why a run does not learn"),
        "diff": ("show:diff", "what two runs have otherwise, and their curves side by side"),
        "metrics": ("metrics:metrics", "all that a run measured: as a table, CSV or Parquet"),
        "log-metrics": ("metrics:log_metrics", "all that a run measured, into TensorBoard, W&B or MLflow"),
        "report": ("plot:report", "one HTML page to share: curves, samples, spec, proofs, cost"),
        "replay": ("episodes:replay", "recorded episodes against fresh environments"),
        "open": ("show:open_", "directory of a run: cd $(lorad open RUN)"),
        "top": ("dashboard:top", "what the dashboard shows, in plain tables"),
        "tui": ("dashboard:tui", "the dashboard, here or in a browser"),
    },
    "Versions and serving": {
        "adapters": ("versions:adapters", "versions of adapters"),
        "checkpoints": ("files:checkpoints", "what a run can be resumed from"),
        "pin": ("versions:pin", "keep versions"),
        "unpin": ("versions:unpin", "let versions go"),
        "eval": ("serve:evaluate", "a version on rows of yours, by a reward"),
        "generate": ("serve:generate", "try a version"),
        "swap": ("aliases:swap", "serve another version"),
        "aliases": ("aliases:aliases", "what is served under which name, and who asks for it how much"),
        "serve": ("serve:serve", "serve adapters on a base that stays warm"),
        "export": ("versions:export", "a version as a PEFT directory"),
        "verify": ("files:verify", "hash and attest what a run has made, again"),
        "tinker": ("tinker.door:app", "let the official tinker client train here"),
    },
    "Box": {
        "devices": ("pools:devices_app", "what there is to run on; keep a device from lorad for a while"),
        "pools": ("pools:pools_app", "base models that are kept warm"),
        "nodes": ("pools:nodes", "the nodes of a cluster, and who has them"),
        "bill": ("pools:bill", "who used how much, and what it costs"),
        "gc": ("files:gc", "delete files that nothing can ask for"),
        "daemon": ("daemon:app", "start, stop and watch the daemon"),
    },
    "Set-up": {
        "init": ("setup:init", "a spec to start from"),
        "doctor": ("doctor:doctor", "check this machine and this home"),
        "hosts": ("machine.hosts:app", "other boxes, for `lorad --host NAME COMMAND`"),
        "backends": ("machine.backends:app", "servers and Megatron: which are here; install one"),
        "models": ("specs.models:models_app", "base models that are here, and who takes them; get one"),
        "notify": ("setup:notify_app", "try out who hears of starts, ends, failures and alarms"),
        "completion": ("setup:completion", "a script to source"),
        "mcp": ("mcp.command:mcp", "lorad as tools for an agent, by the Model Context Protocol"),
        "skill": ("skill.skill:skill", "what an agent should know of lorad: SKILL.md"),
    },
}
_COMMANDS = {name: _Command(*line) for lines in _PANELS.values() for name, line in lines.items()}


# What people type who come from other tools: for the first it is the command, for the others a hint.
_ALIASES = {"ps": "list", "ls": "list", "status": "top", "compare": "diff"}
_MEANT = {
    "cancel": ("stop", "kill"),
    "delete": ("rm",),
    "remove": ("rm",),
    "download": ("models get",),
    "gpus": ("devices",),
    "merge": ("export --merge",),
    "start": ("run", "resume"),
    "restart": ("resume",),
    "train": ("run",),
    "info": ("show",),
    "config": ("spec", "init"),
    "chat": ("generate",),
    "runs": ("list",),
    "validate": ("check",),
    "version": ("--version",),
    "sweeps": ("sweep --list",),
    "describe": ("show",),
    "tail": ("logs",),
    "nvidia-smi": ("devices",),
    "tensorboard": ("log-metrics",),
}
_WITH_KEYS = ("run", "job", "check", "try", "sweep", "resume", "fork")  # commands that take KEY=VALUE


class _LazyGroup(TyperGroup):
    """Knows every verb by name and imports its module only to run it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as click does, but suggest the nearest verbs for an unknown one."""
        verb = _ALIASES.get(args[0], args[0])
        ctx.obj = [verb, *args[1:]]
        if verb in _COMMANDS or ctx.resilient_parsing or verb.startswith("-"):
            return super().resolve_command(ctx, [verb, *args[1:]])
        near = _MEANT.get(verb) or get_close_matches(verb, _COMMANDS)
        near = near or [name for name in _COMMANDS if name.startswith(verb)]
        hint = f"Did you mean {' or '.join(near)}?" if near else "`lorad --help` lists all commands."
        raise SpecError(f"there is no command {verb}", hint=hint)

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read what stands before the command. Raises SpecError for what it does not have."""
        with _refused():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command. Raises SpecError for a flag or an argument that it does not have or take."""
        with _refused():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print each command with what it is about, in panels; none is imported."""
        commands: dict[str, Any] = {
            name: TyperCommand(name, help=about, rich_help_panel=panel)
            for panel, lines in _PANELS.items()
            for name, (_, about) in lines.items()
        }
        listing = TyperGroup(
            name=self.name,
            commands=commands,
            params=self.params,
            help=self.help,
            rich_markup_mode=self.rich_markup_mode,
            context_settings=self.context_settings,
        )
        listing.format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Offer every verb with what it is about; none is imported."""
        from typer._click.shell_completion import CompletionItem

        if ctx._protected_args or ctx.args:  # they follow a verb that does not exist
            return []
        named = ((name, verb) for name, verb in _COMMANDS.items() if name.startswith(incomplete))
        verbs = [CompletionItem(name, help=verb.about) for name, verb in named]
        return [*verbs, *TyperCommand.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].place.partition(":")
        with quick_imports():
            function_or_group = getattr(importlib.import_module(f"lorad.cli.commands.{module}"), name)
        group = function_or_group
        if not isinstance(group, typer.Typer):
            group = typer.Typer(add_completion=False)
            group.command()(function_or_group)
        command = build(group)
        command.name = cmd_name
        return command


@contextmanager
def _refused() -> Iterator[None]:
    """Say in lorad's words what the parser refuses. Raises SpecError."""
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except NoSuchOption as error:
        message = f"{_command_of(error.ctx)} has no option {error.option_name}"
        raise SpecError(message, hint=_flag_meant(error)) from None
    except BadOptionUsage as error:
        raise SpecError(f"{error.option_name} has no value", hint="Write one behind it.") from None
    except UsageError as error:
        what = error.format_message().rstrip(".")
        command = _command_of(error.ctx)
        hint = f"`{command} --help` shows what it takes."
        if inner := getattr(error.ctx and error.ctx.command, "commands", None):
            hint = f"Its commands are {', '.join(inner)}."
        raise SpecError(f"{command}: {what[:1].lower()}{what[1:]}", hint=hint) from None


def _command_of(ctx: Any) -> str:
    """Return the words of the command that was parsed: `lorad tinker start`."""
    return "lorad" if ctx is None or ctx.parent is None else f"{_command_of(ctx.parent)} {ctx.info_name}"


def _flag_meant(error: NoSuchOption) -> str:
    """Suggest where an option of lorad's own stands, the key of the spec that is meant, or near options."""
    command = _command_of(error.ctx)
    if command == "lorad":
        return "Options of a command stand behind it: `lorad COMMAND --help` lists them."
    if error.ctx and any(error.option_name in param.opts for param in error.ctx.find_root().command.params):
        return f"It stands in front: `lorad {error.option_name} … {command.removeprefix('lorad ')}`."
    if command.removeprefix("lorad ") in _WITH_KEYS:
        from lorad.spec.errors import key_called
        from lorad.spec.model import Spec

        if key := key_called(Spec, error.option_name):
            return f"Keys of the spec have no flags: write {key}=VALUE behind what is run."
    if near := [name for name in error.possibilities or () if name != "--help"]:
        return f"Did you mean {' or '.join(near)}?"
    return f"`{command} --help` lists its options."


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def lorad(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    host: str | None = typer.Option(
        None,
        "--host",
        metavar="NAME",
        help="The box it is about, as `lorad hosts` has it; `here`; for `list`, `all`.",
    ),
    cwd: str | None = typer.Option(
        None, "--cwd", metavar="DIR", help="On that box: where relative paths begin."
    ),
    send: bool = typer.Option(
        False, "--send", help="Send the files that the spec names to that box, 64 MiB at most."
    ),
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
    from lorad.cli.commands.machine.reach import go  # it knows clients, and `lorad --version` needs none

    go(ctx.obj, host, cwd, send=send)


def main() -> None:
    """Run the command line of this process."""
    settle_streams()
    give_home()
    if shell := os.environ.pop(VARIABLE, ""):
        answer(shell, build(app))
        return
    hook_transport(sys.argv[1:])
    try:
        with _flushed():
            app()
    except LoradError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        give_up_streams()
        sys.exit(1)
    except OSError as error:  # from a file that was named, from the home, or from what is printed to
        _fail(StorageError(f"{error.filename or 'lorad'}: {error.strerror or error}"))
    except UnicodeError as error:
        if sys.getfilesystemencoding() == "utf-8":
            raise
        _fail(StorageError(f"this locale has no name for a file: {error}", hint="Set LC_ALL=C.UTF-8."))


@contextmanager
def _flushed() -> Iterator[None]:
    """Write what is left for stdout at the end of a command, while its errors can still be told."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise


def _fail(error: LoradError) -> NoReturn:
    with suppress(OSError):
        print_error(error)
    give_up_streams()
    sys.exit(error.exit_code)
