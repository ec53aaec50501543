"""The command `lorad skill`: what agents should know of lorad, as text and in the place where they look."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import NODEFAULT

from lorad import __version__
from lorad.cli import output
from lorad.cli.options import AsJson
from lorad.errors import SpecError
from lorad.files import expanded
from lorad.spec.algorithm import PRESETS, Algorithm
from lorad.spec.keys import sections_of
from lorad.spec.model import Spec

# Where programs look for skills: of a user, below the home, and of a project.
_PLACES = {
    "claude": ("~/.claude/skills", ".claude/skills"),
    "codex": ("~/.codex/skills", ".codex/skills"),
    "opencode": ("~/.config/opencode/skills", ".opencode/skills"),
}
_NAME = "lorad"


def skill(
    ctx: typer.Context,
    install: Annotated[
        str | None, typer.Option(metavar="claude|codex|opencode|DIR", help="Copy it there.")
    ] = None,
    project: Annotated[
        bool, typer.Option("--project", help="Into this directory's project instead of your home.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what an agent should know of lorad (SKILL.md), or install it with references made from the code.

    A copy of another version is named on stderr; --install replaces it.
    """
    text = (Path(__file__).parent / "SKILL.md").read_text().replace("VERSION", __version__, 1)
    if install is None:
        for name, places in _PLACES.items():
            for place, flag in zip(places, ("", " --project"), strict=True):
                copy = expanded(place) / _NAME / "SKILL.md"
                if copy.is_file() and copy.read_text() != text:
                    output.note(f"{copy} is of another version: `lorad skill --install {name}{flag}`.")
        if as_json:
            output.print_json({"version": __version__, "text": text})
        else:
            print(text, end="")
        return
    if project and install not in _PLACES:
        hint = f"It goes with {', '.join(_PLACES)}; a directory is named as it is."
        raise SpecError("--project has no program to go with", hint=hint)
    directory = expanded(_PLACES[install][project] if install in _PLACES else install) / _NAME
    (directory / "references").mkdir(parents=True, exist_ok=True)
    group: Any = ctx.find_root().command  # of commands, which know their help
    algorithms = (f"- `{name}`: {Algorithm(name=name).in_words}" for name in PRESETS)
    from lorad.tui.spec_lines import value_text

    keys = []
    for key in (key for section in sections_of(Spec) for key in section.keys):
        default = "required" if key.default is NODEFAULT else value_text(key.default)
        keys.append(f"- `{key.name}` ({key.values}; default {default}): {key.meaning}")
    references = {"commands": _commands(group, ctx), "spec": keys, "algorithms": algorithms}
    for name, lines in references.items():
        (directory / "references" / f"{name}.md").write_text("\n".join(lines) + "\n")
    (directory / "SKILL.md").write_text(text)
    answer = {"directory": str(directory.absolute()), "version": __version__}
    output.note_or_json(answer, f"The skill is in {answer['directory']}.", as_json=as_json)


def _commands(group: Any, ctx: Any) -> Iterator[str]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        with typer.Context(command, info_name=f"lorad {name}") as inner:
            usage = " ".join([f"lorad {name}", *command.collect_usage_pieces(inner)])
            yield f"## {usage.replace('{', '').replace('}', '')}\n"
            yield f"{' '.join((command.help or '').split())}\n"
            for parameter in command.get_params(inner):
                if record := parameter.get_help_record(inner):
                    yield f"- `{record[0]}`: {' '.join(record[1].split())}"
            if commands := getattr(command, "commands", None):
                yield f"- its commands: {', '.join(commands)}"
            yield ""
