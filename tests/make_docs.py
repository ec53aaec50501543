"""`python -m tests.make_docs`: the parts of `docs/` that are made from the code.

Such a part stands between `<!-- made from the code: NAME -->` and `<!-- end -->`; what is around it is
written by hand.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import asdict
from typer.core import TyperGroup
from typer.main import get_command

from lorad.box.config import Config
from lorad.cli.app import app
from lorad.spec.algorithm import PRESETS, Algorithm
from lorad.spec.model import Spec
from lorad.tui.spec_fields import in_words, meanings
from lorad.tui.spec_lines import value_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
PART = re.compile(r"(<!-- made from the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


# -- keys ----------------------------------------------------------------------------------------------------
def keys_of_spec() -> str:
    return "\n".join(_section(Spec, ""))


def keys_of_config() -> str:
    return "\n".join(_section(Config, ""))


def _section(part: type[Struct], name: str) -> Iterator[str]:
    """A heading, one row for each key, and then the sections inside."""
    means, inside = meanings(part), []
    yield from (f"### `{name}`", "") if name else ()
    if name and (about := _first_sentence(part)):
        yield from (about, "")
    rows = []
    for field in msgspec.structs.fields(part):
        path = f"{name}.{field.name}".lstrip(".")
        if section := _struct_in(field.type):
            inside.append((section, f"{path}{_below(field.type)}"))
        if section is None or not isinstance(field.type, type):
            values = in_words(field.type).replace("or none", "or null")
            rows.append(f"| `{path}` | {_default(field)} | {_cell(values)} | {_cell(means[field.name])} |")
    if rows:
        yield from ("| key | default | values | meaning |", "|---|---|---|---|", *rows, "")
    for section, path in inside:
        yield from _section(section, path)


def _struct_in(kind: Any) -> type[Struct] | None:
    """The section below a key: its value, the values of its names, or its longer form."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    inside = [arg for arg in get_args(kind) if isinstance(arg, type) and issubclass(arg, Struct)]
    if inside:
        return inside[0]
    return next((_struct_in(arg) for arg in get_args(kind) if get_origin(arg) is list), None)


def _below(kind: Any) -> str:
    """What stands between a key and the keys of its section: a name, or the place in a list."""
    if get_origin(kind) is dict:
        return ".NAME"
    is_list = [get_origin(one) is list and len(get_args(one)) == 1 for one in (kind, *get_args(kind))]
    direct = any(isinstance(one, type) and issubclass(one, Struct) for one in (kind, *get_args(kind)))
    return "[N]" if any(is_list) and (get_origin(kind) is list or not direct) else ""


def _first_sentence(part: type[Struct]) -> str:
    return " ".join((part.__doc__ or "").partition("Attributes:")[0].split())


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return ""
    made = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return f"`{value_text(list(made) if isinstance(made, tuple) else made)}`"


def _cell(text: str) -> str:
    """Text as a cell of a table; a single sentence loses its full stop."""
    text = text.replace("|", "\\|").replace("\\[", "[")
    return text if ". " in text else text.removesuffix(".")


# -- commands ------------------------------------------------------------------------------------------------
def commands() -> str:
    root: Any = get_command(app)
    with typer.Context(root) as context:
        found = [
            line
            for name in root.list_commands(context)
            for line in _command(f"lorad {name}", root, name, context)
        ]
    return "\n".join(found)


def _command(path: str, group: Any, name: str, context: Any) -> Iterator[str]:
    """A heading, the usage line, the help, and a row for each argument and option; then its own commands."""
    command = group.get_command(context, name)
    with typer.Context(command, info_name=path) as inner:
        yield from (f"{'#' * (1 + len(path.split()))} `{path}`", "", "```", _usage(command, inner), "```", "")
        if said := " ".join((command.help or "").replace("\\[", "[").split()):
            yield from (said, "")
        rows = [row for parameter in command.get_params(inner) if (row := _parameter(parameter, inner))]
        if rows:
            yield from ("| | |", "|---|---|", *rows, "")
        if isinstance(command, TyperGroup):
            for verb in command.list_commands(inner):
                yield from _command(f"{path} {verb}", command, verb, inner)


def _usage(command: Any, context: Any) -> str:
    return " ".join([context.info_name, *command.collect_usage_pieces(context)]).translate(
        {123: None, 125: None}
    )


def _parameter(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        words, written = parameter.help or "", parameter.make_metavar(context)
        return f"| `{_cell(written)}` | {_cell(words)} |" if words else ""
    record = parameter.get_help_record(context)
    if record is None or "--help" in record[0]:
        return ""
    return f"| `{_cell(' '.join(record[0].split()))}` | {_cell(' '.join(record[1].split()))} |"


# -- algorithms ----------------------------------------------------------------------------------------------
def presets() -> str:
    usual = PRESETS["grpo"]
    rows = [f"| `grpo` | {Algorithm().in_words} |"]
    for name, parts in PRESETS.items():
        other = {key: value for key, value in asdict(parts).items() if value != getattr(usual, key)}
        if other:
            rows.append(
                f"| `{name}` | {', '.join(f'{k} {value_text(_plain(v))}' for k, v in other.items())} |"
            )
    rows.append("| `custom` | advantage or loss, or both: functions of yours |")
    return "\n".join(("| name | its parts; of all but grpo, what differs |", "|---|---|", *rows, ""))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


MADE: dict[str, Callable[[], str]] = {
    "spec": keys_of_spec,
    "config": keys_of_config,
    "commands": commands,
    "presets": presets,
}


def whole(text: str) -> str:
    """The page with its made parts as the code says now."""
    return PART.sub(lambda found: f"{found[1]}{MADE[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if (made := whole(text)) != text:
            page.write_text(made)
            print(page)
