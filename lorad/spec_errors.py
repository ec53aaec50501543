"""What is wrong with a mapping that should be a spec, in words that name the key and what it may be."""

from __future__ import annotations

import difflib
from typing import Any, get_args

import msgspec
from msgspec import Struct

from lorad.errors import SpecError

NAME_HINT = "A name is 1 to 63 of a-z, 0-9, dot, dash and underscore, and begins with a letter or a digit."


def refuse_unknown(data: dict[str, Any], part: type[Struct], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(part)}
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            known = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(fields)}"
            raise SpecError(f"{prefix}{key}: unknown key", hint=known[0].upper() + known[1:])
        section = _section(fields[key])
        if section is not None and isinstance(value, dict):
            refuse_unknown(value, section, f"{prefix}{key}.")


def _section(kind: Any) -> type[Struct] | None:
    candidates = (kind, *getattr(kind, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Struct)), None)


def advice(spec: type[Struct], message: str) -> str:
    """What the key that `message` begins with may be."""
    kind: Any = spec
    default: Any = None
    for part in message.partition(":")[0].partition("[")[0].split("."):
        fields = {field.name: field for field in msgspec.structs.fields(_section(kind) or spec)}
        if part not in fields:
            return "See `lorad init` for a spec."
        kind, default = fields[part].type, fields[part].default
        if default is msgspec.NODEFAULT and fields[part].default_factory is not msgspec.NODEFAULT:
            default = fields[part].default_factory()
    if message.startswith("name:"):
        return NAME_HINT
    if choices := [value for value in get_args(kind) if isinstance(value, str)]:
        return f"Choose one of: {', '.join(choices)}."
    if (section := _section(kind)) is not None:
        return f"Its keys: {', '.join(section.__struct_fields__)}."
    return f"The default is {msgspec.json.encode(default).decode()}."


def readable(message: str) -> str:
    """`Expected `int` >= 1 - at `$.lora.rank`` -> `lora.rank: Expected int >= 1`."""
    text, _, where = message.partition(" - at ")
    key = where.strip("`").removeprefix("$").removeprefix(".")
    return f"{key}: {text}".replace("`", "") if key else text.replace("`", "")
