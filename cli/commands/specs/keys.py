"""The command `lorad spec`: the keys of a spec, what they mean, and the JSON Schema of all of them."""

from typing import Annotated

import msgspec
import typer

from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson
from lorad.errors import SpecError
from lorad.spec.errors import key_called, leaves
from lorad.spec.keys import Key, sections_of
from lorad.spec.model import Spec
from lorad.spec.synonyms import called_elsewhere

_COLUMNS = table.columns("key, default 1, unit 3, values 2 fold, meaning fold")


def spec(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            help="A key or a section: trainer.lr, trainer; or a word to look for.",
            autocompletion=candidates.keys,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print a JSON Schema of the whole spec, for editors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the keys of a spec with default, unit and meaning; all of them, those of a section, or one.

    `lorad spec --schema > lorad.schema.json` makes what yaml-language-server (VS Code, neovim, …) completes
    and checks by.
    """
    if schema:
        from lorad.spec.schema import schema as made  # slow

        output.print_json(made())
        return
    matching = keys_like(key)
    if as_json:
        described = [each._asdict() for each in matching]
        for row in described:
            if row["default"] is msgspec.NODEFAULT:  # it has to be given
                del row["default"]
        output.print_json(described)
    elif len(matching) == 1:
        (only,) = matching
        fields = {"key": only.name, "default": _default(only), "unit": only.unit, "values": only.values}
        filled = [(name, value) for name, value in fields.items() if value]
        example = f"lorad run spec.yaml {only.name}=…"
        table.print_fields([*filled, ("meaning", only.meaning), ("example", example)])
    else:
        rows = [(key.name, _default(key), key.unit, key.values, key.meaning) for key in matching]
        output.print_table(_COLUMNS, rows, empty="")


def keys_like(typed: str | None) -> list[Key]:
    """Find a key, the keys of a section, or those with a word in name or meaning. Raises SpecError."""
    keys = [key for section in sections_of(Spec) for key in section.keys]
    if typed is None:
        return keys
    name = typed.strip().removesuffix(".")
    exact = [key for key in keys if key.name == name]
    inside = [key for key in keys if key.name.startswith(f"{name}.")]
    last = [key for key in keys if key.name.rpartition(".")[2] == name]
    word = [key for key in keys if name.lower() in f"{key.name} {key.meaning}".lower()]
    called = [key for key in keys if key.name == called_elsewhere(name) and key not in last]
    dotted = [key for key in keys if key.name == key_called(Spec, name)] if "." in name else []
    matching = [*exact, *inside] or [*called, *last] or dotted or word
    if not matching:
        from difflib import get_close_matches

        paths = list(leaves(Spec))
        names = {path.rpartition(".")[2]: path for path in paths} | {path: path for path in paths}
        near = [*dict.fromkeys(names[word] for word in get_close_matches(name, names, n=3))]
        hint = f"Did you mean {' or '.join(near)}?" if near else "`lorad spec` lists all keys."
        raise SpecError(f"no key of the spec is called {typed}, and none says it", hint=hint)
    return matching


def _default(key: Key) -> str:
    from lorad.tui.spec_lines import value_text

    return "required" if key.default is msgspec.NODEFAULT else value_text(key.default)
