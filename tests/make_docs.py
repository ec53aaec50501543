"""`python -m tests.make_docs`: the parts of `docs/` that are made from the code.

Such a part stands between `<!-- made from the code: NAME -->` and `<!-- end -->`; what is around it is
written by hand.
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from textwrap import wrap
from typing import Any, get_args

import msgspec
import typer
from msgspec import Struct, structs
from msgspec.structs import asdict
from typer.core import TyperGroup
from typer.main import get_command

import lorad
from lorad.box.config import Config
from lorad.cli.app import app
from lorad.limits.limit import BackendLimit
from lorad.limits.of_engines import OF_ENGINES
from lorad.limits.of_trainers import OF_TRAINERS
from lorad.records.metrics import METRICS, NAMED
from lorad.records.routes import ROUTES
from lorad.spec.algorithm import PRESETS, Algorithm
from lorad.spec.keys import Key, sections_of
from lorad.spec.model import Spec
from lorad.tui.spec_lines import value_text

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
WIDTH = 118  # columns of prose
PART = re.compile(r"(<!-- made from the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


# -- keys ----------------------------------------------------------------------------------------------------
def keys_of_spec() -> str:
    return "\n".join(_sections(Spec))


def keys_of_config() -> str:
    return "\n".join(_sections(Config))


def _sections(part: type[Struct]) -> Iterator[str]:
    """For each section a heading, and one row for each key."""
    for section in sections_of(part):
        if section.name:
            yield from (f"### `{section.name}`", "")
            yield from (section.about, "") if section.about else ()
        rows = [
            f"| `{key.name}` | {_default(key)} | {_cell(key.values)} | {_cell(key.meaning)} |"
            for key in section.keys
        ]
        if rows:
            yield from ("| key | default | values | meaning |", "|---|---|---|---|", *rows, "")


def _default(key: Key) -> str:
    return "" if key.default is msgspec.NODEFAULT else f"`{value_text(key.default)}`"


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
            yield from (*wrap(said, WIDTH, break_long_words=False, break_on_hyphens=False), "")
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


# -- limits --------------------------------------------------------------------------------------------------
def limits_of_trainers() -> str:
    return _limits(OF_TRAINERS)


def limits_of_engines() -> str:
    return _limits(OF_ENGINES)


def _limits(limits: Mapping[str, Sequence[BackendLimit]]) -> str:
    """A row for each limit, in the words of its error, whose numbers and names are dots."""
    rows = [
        f"| {name or 'all'} | `{row.key.partition('.{')[0]}` | {_dotted(row.why)} | {_dotted(row.hint)} |"
        for name, theirs in limits.items()
        for row in theirs
    ]
    return "\n".join(("| of | key | why it is refused | what to do |", "|---|---|---|---|", *rows, ""))


def _dotted(words: str) -> str:
    parts = Formatter().parse(words)
    return _cell("".join(text if field is None else f"{text}…" for text, field, _, _ in parts))


# -- Python --------------------------------------------------------------------------------------------------
def python() -> str:
    """A table of each public name and its methods, from their docstrings."""
    lines: list[str] = []
    functions = [name for name in lorad.__all__ if inspect.isfunction(getattr(lorad, name))]
    lines += _api_table("lorad", "", [(name, getattr(lorad, name)) for name in functions])
    for name in ("Lorad", "Run", "Sweep", "Table"):
        kind = getattr(lorad, name)
        own = [(key, value) for key, value in vars(kind).items() if not key.startswith("_")]
        lines += _api_table(name, inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0], own)
    return "\n".join(lines)


def _api_table(name: str, about: str, members: list[tuple[str, Any]]) -> Iterator[str]:
    yield from (f"### `{name}`", "", *([" ".join(about.split()), ""] if about else []))
    yield from ("| name | meaning |", "|---|---|")
    for key, value in members:
        said = inspect.cleandoc(inspect.getdoc(value) or "")
        first, _, rest = said.partition("\n\n")
        words = " ".join(" ".join(part.split()) for part in (first, rest) if part)
        yield f"| `{key}{'' if isinstance(value, property) else signature(value)}` | {_cell(words)} |"
    yield ""


def signature(function: Any) -> str:
    """The arguments of a function with their defaults, without types."""
    found = inspect.signature(function)
    shown = [one.replace(annotation=one.empty) for one in found.parameters.values() if one.name != "self"]
    kinds = [one for one in shown if one.kind is not one.POSITIONAL_ONLY]
    parts = [str(one) for one in shown if one.kind is one.POSITIONAL_ONLY]
    return f"({', '.join(filter(None, [*parts, str(inspect.Signature(kinds))[1:-1]]))})"


# -- requests ------------------------------------------------------------------------------------------------
def requests() -> str:
    """A row for each request of the daemon: where it goes, the fields of its body, and what it answers."""
    lines = ["| verb | request | body | answer |", "|---|---|---|---|"]
    for verb, route in ROUTES.items():
        fields = () if route.request is None else structs.fields(route.request)
        body = ", ".join(f"`{field.name}`" for field in fields)
        (kind, *_) = get_args(route.answer) or (route.answer,)
        answer = f"{'a list of ' if get_args(route.answer) else ''}`{kind.__name__}`"
        lines.append(f"| `{verb}` | `{route.method} {route.path}` | {body} | {answer} |")
    return "\n".join(lines)


# -- metrics -------------------------------------------------------------------------------------------------
def metrics() -> str:
    """A table of metrics for steps of all kinds, and one for each kind of algorithm that has more."""
    lines: list[str] = []
    for heading, kind in (
        ("Every step", None),
        ("Reinforcement learning", "rl"),
        ("Supervised fine-tuning", "sft"),
        ("Preferences", "preference"),
        ("The tinker client", "tinker"),
    ):
        lines += (f"## {heading}", "", "| metric | what it is | |", "|---|---|---|")
        lines += [
            f"| `{name}{'NAME' * name.endswith('/')}` | {_cell(metric.title)} | {_cell(metric.about)} |"
            for name, metric in {**METRICS, **NAMED}.items()
            if (kind in metric.kinds if kind else not metric.kinds)
        ]
        lines.append("")
    return "\n".join(lines)


# -- rooms ---------------------------------------------------------------------------------------------------
def rooms() -> str:
    """A row for each layer of the import contract, from the top down, as its packages describe themselves."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    lines = ["| | room | what it is | its data | a change |", "|---|---|---|---|---|"]
    for height, layer in zip(range(len(layers), 0, -1), layers, strict=True):
        lines += [f"| {height} | `{room}` | {' | '.join(about(room))} |" for room in layer.split(" | ")]
    return "\n".join(lines)


def about(room: str) -> list[str]:
    """Read of the docstring of a package what it is for, where its data comes from, and how it is changed.
    Rooms of one file say the first alone.
    """
    folder = REPOSITORY / "lorad" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    paragraphs = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")
    if not folder.is_dir():
        paragraphs[1:] = ("", "")
    return [_cell(" ".join(paragraph.split())) for paragraph in paragraphs[:3]]


MADE: dict[str, Callable[[], str]] = {
    "spec": keys_of_spec,
    "config": keys_of_config,
    "commands": commands,
    "presets": presets,
    "limits_of_trainers": limits_of_trainers,
    "limits_of_engines": limits_of_engines,
    "python": python,
    "requests": requests,
    "metrics": metrics,
    "rooms": rooms,
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
