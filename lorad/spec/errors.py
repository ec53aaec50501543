"""Say what is wrong with a mapping that should be a spec, by key, and what the key may be."""

import difflib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from lorad.errors import SpecError
from lorad.spec.keys import in_words, struct_in
from lorad.spec.synonyms import called_elsewhere

_DEEPEST = 6  # sections in each other, as far as a key of others is looked for
_MOST = 20  # keys of one section that are explained
_LONGEST = 60  # characters of a key that others are like
NAME_HINT = (
    "A name is 1 to 63 of A-Z, a-z, 0-9, dot, dash and underscore, and begins with a letter or a digit."
)


def without_unknown(
    data: dict[str, Any], part: type[Struct], prefix: str = ""
) -> tuple[dict[str, Any], list[SpecError]]:
    """Return the keys that there are, and an error for each of the others."""
    fields = {field.name: field.type for field in msgspec.structs.fields(part)}
    accepted: dict[str, Any] = {}
    wrong: list[SpecError] = []
    for key, value in data.items():
        if key not in fields:
            wrong += _unknown(part, str(key), value, prefix) if len(wrong) < _MOST else []
            continue
        section = _section(fields[key])
        named = _section_by_name(fields[key])
        if section is not None and isinstance(value, dict):
            value, more = without_unknown(value, section, f"{prefix}{key}.")
            wrong += more
        elif named is not None and isinstance(value, dict):
            value, more = _sound(value, named, f"{prefix}{key}.")
            wrong += more
        accepted[key] = value
    return accepted, wrong


def _sound(data: dict[str, Any], part: type[Struct], prefix: str) -> tuple[dict[str, Any], list[SpecError]]:
    """Return the sections that are right, by name, and an error for what is wrong in each of the others."""
    sound = dict[str, Any]()
    wrong = list[SpecError]()
    for name, value in data.items():
        if len(wrong) >= _MOST:
            break
        accepted = value
        more = list[SpecError]()
        if isinstance(value, dict):
            accepted, more = without_unknown(value, part, f"{prefix}{name}.")
        try:
            msgspec.convert(accepted, part)
            sound |= {} if more else {name: accepted}
        except msgspec.ValidationError as error:
            inner = readable(str(error))
            key = f"{prefix}{name}.{inner.path}"
            hint = f"Its keys: {', '.join(part.__struct_fields__)}."
            more = more or [SpecError(inner.problem, key=key.removesuffix("."), hint=hint)]
        wrong += more
    return sound, wrong


def _unknown(part: type[Struct], key: str, value: Any, prefix: str) -> list[SpecError]:
    """Return an error for each known key within a foreign section (`actor.optim.lr` is trainer.lr), else one.

    It suggests the key that others call so and the nearest ones with that name further in (`lr` is
    trainer.lr), else similar keys, else all that there are.
    """
    within = _within(value, f"{prefix}{key}") if isinstance(value, dict) and value else []
    errors = [
        SpecError("unknown key", key=path, hint=f"Did you mean {meant}?")
        for path in within[:_MOST]
        if (meant := key_called(part, path, prefix))
    ]
    if errors:
        return errors
    below = {path: path.rpartition(".")[2] for path in leaves(part, prefix)}
    inner = [path for path, name in below.items() if name == key]
    inner = [path for path in inner if path.count(".") == min(path.count(".") for path in inner)]
    inner = [*dict.fromkeys(filter(None, (called_elsewhere(key), *inner)))]
    fields = part.__struct_fields__
    near = inner or [f"{prefix}{name}" for name in _nearest(key, fields)]
    if not near:
        alike = _nearest(key, below.values())
        near = [path for path, name in below.items() if name in alike]
    hint = f"Did you mean {' or '.join(near[:3])}?" if near else f"Known here: {', '.join(fields)}"
    return [SpecError("unknown key", key=f"{prefix}{key}", hint=hint)]


def _within(value: Any, path: str) -> list[str]:
    """Return the keys, dotted, that hold the values of sections in each other."""
    if not isinstance(value, dict) or path.count(".") > _DEEPEST:
        return [path]
    return [inner for key, inner_value in value.items() for inner in _within(inner_value, f"{path}.{key}")]


def _nearest(key: str, words: Iterable[str]) -> list[str]:
    """Return the known word that is most like a key, if any is; none for a text that is no word."""
    return difflib.get_close_matches(key, words, n=1) if len(key) <= _LONGEST else []


def key_called(part: type[Struct], name: str, prefix: str = "") -> str:
    """Return the key that a flag or a word, perhaps dotted, may mean; "" for none.

    It is the key that it ends with, that others call so, or else the nearest to the top of that name.
    """
    words = name.lstrip("-").replace("-", "_").split(".")
    keys = leaves(part, prefix)
    ends = (".".join(words[at:]) for at in range(len(words) - 1))
    same = next((end for end in ends if end in keys), "")
    inner = [path for path in keys if path.rpartition(".")[2] == words[-1]]
    return same or called_elsewhere(name) or min(inner, key=lambda path: path.count("."), default="")


@lru_cache(maxsize=64)  # a prefix may hold a name that somebody chose
def leaves(part: type[Struct], prefix: str = "") -> tuple[str, ...]:
    """Return all keys below a section that hold a value, dotted."""
    keys = list[str]()
    for field in msgspec.structs.fields(part):
        section = _section(field.type)
        keys += [f"{prefix}{field.name}"] if section is None else leaves(section, f"{prefix}{field.name}.")
    return tuple(keys)


def without(data: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """Return a copy without the value at `path`; None where nothing is there."""
    if not path or path[0] not in data:
        return None
    rest = {key: value for key, value in data.items() if key != path[0]}
    if len(path) == 1:
        return rest
    inner = data[path[0]]
    changed = without(inner, path[1:]) if isinstance(inner, dict) else None
    return rest if changed is None else rest | {path[0]: changed}


def _section(kind: Any) -> type[Struct] | None:
    """Return the section that a key holds, where it can hold one; None also for sections by name."""
    candidates = () if get_origin(kind) is dict else (kind, *getattr(kind, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Struct)), None)


def _section_by_name(kind: Any) -> type[Struct] | None:
    """Return the section that is below each name of a key such as eval.sets."""
    return _section(get_args(kind)[1]) if get_origin(kind) is dict else None


def advice(spec: type[Struct], key: str) -> str:
    """Describe what a dotted key may be."""
    field = _field_at(spec, key)
    if field is None:
        return "See `lorad init` for a spec."
    kind, default = field
    if key == "name":
        return NAME_HINT
    if named := _literals(kind):
        is_all = all(one is type(None) or get_origin(one) is Literal for one in get_args(kind))
        is_all |= get_origin(kind) is Literal
        return f"Choose one of: {', '.join(named)}." if is_all else f"Give {in_words(kind)}."
    if (section := _section(kind) or struct_in(kind)) is not None:
        return f"Its keys: {', '.join(section.__struct_fields__)}."
    return f"The default is {msgspec.json.encode(default).decode()}."


def _field_at(spec: type[Struct], key: str) -> tuple[Any, Any] | None:
    """Return the type and the default of a dotted key; None where there is no such key."""
    kind: Any = spec
    default: Any = None
    for part, *at in (word.split("[") for word in key.split(".")):
        if (named := _section_by_name(kind)) is not None:
            kind = named
            default = None
            continue
        fields = {field.name: field for field in msgspec.structs.fields(_section(kind) or spec)}
        if part not in fields:
            return None
        kind = fields[part].type
        default = fields[part].default
        if default is msgspec.NODEFAULT and fields[part].default_factory is not msgspec.NODEFAULT:
            default = fields[part].default_factory()
        if at and (inner := [one for one in (kind, *get_args(kind)) if get_origin(one) is list]):
            (kind,) = get_args(inner[0])
    return kind, default


def choices(spec: type[Struct], key: str) -> list[str]:
    """Return the values that a dotted key can have, where they are few."""
    field = _field_at(spec, key)
    kinds = () if field is None else (field[0], *get_args(field[0]))
    return (_literals(field[0]) if field else []) or ["true", "false"] * (bool in kinds)


def _literals(kind: Any) -> list[str]:
    """Return the values of a Literal, also of one that may be null."""
    values = [value for value in get_args(kind) if isinstance(value, str)]
    return values or [
        value for inner in get_args(kind) if get_origin(inner) is Literal for value in get_args(inner)
    ]


def readable(message: str) -> SpecError:
    """Return msgspec's "Expected `int` >= 1 - at `$.lora.rank`" as an error that blames `lora.rank`."""
    text, _, where = message.partition(" - at ")
    if "matching regex" in text:
        text = "this is no name that can be used"
    key = where.strip("`").removeprefix("$").removeprefix(".")
    return SpecError(text.replace("`", ""), key=key.replace("`", ""))
