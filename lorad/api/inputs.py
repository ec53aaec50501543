"""Turn what Python users pass (specs, keys, versions) into what the daemon takes."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorad.client.boxes.hosts import Place
from lorad.client.overrides import from_here, read_spec
from lorad.errors import SpecError
from lorad.records.versions import Version

Spec = str | os.PathLike[str] | Mapping[str, Any]
_FILES = (".yaml", ".yml", ".json")
_PLAIN = re.compile(r"[A-Za-z_./][\w./@+\-]*(:[\w./@+\-]+)?")  # a text that YAML reads as the same text
_WORDS = ("null", "true", "false", "inf", "nan", ".inf", ".nan")
_HINT = 'Give a file ("run.yaml"), its text, or a dict: {"data": {"train": "sort"}}.'


def spec_text(spec: Spec) -> tuple[str, str, str]:
    """Return the text of a spec, its name in messages, and where its relative paths begin.

    spec: a dict, the text of one (of several lines, or with `: `), or else the name of a file.

    Raises SpecError for a file that cannot be read, and for values that YAML does not have.
    """
    if isinstance(spec, Mapping):
        import yaml  # slow, and only needed for dicts

        plain = {str(key): _builtin(str(key), value) for key, value in spec.items()}
        text = str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        return text, "spec", str(Path.cwd())
    name = os.fspath(spec)
    if isinstance(spec, str) and not name.lower().endswith(_FILES) and ("\n" in name or ": " in name):
        return name, "spec", str(Path.cwd())
    if not name or name == "-":
        raise SpecError("there is no spec", hint=_HINT)
    text, source, directory = read_spec(name)
    return text, source, str(directory)


def overrides(keys: Mapping[str, Any], where: "Place | None" = None) -> list[str]:
    """Write keys of a spec as `key=value`. A dict for a section changes the keys that it has and no others.

    Relative paths begin at the working directory; they stay relative for a home on another box, `where`.

    Raises SpecError for values that YAML does not have.
    """
    from lorad.spec.model import Spec as Sections  # slow, and not needed where nothing is overridden

    return from_here([f"{key}={_value(key, value)}" for key, value in _leaves(Sections, "", keys)], where)


def axes(grid: Mapping[str, Iterable[Any]], where: "Place | None" = None) -> list[str]:
    """Write keys and their values as `key=a,b`. Raises SpecError for a key without values."""
    axes = []
    for key, values in grid.items():
        points = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
        if not points:
            raise SpecError("a grid has a list of values for each key", key=key, hint=f"{key!r}: [a, b]")
        axes.append(f"{key}={','.join(_value(key, value) for value in points)}")
    return from_here(axes, where)


def version_name(version: str | Version) -> str:
    """Return run@number of a version. A text is already such a name: an alias, run@best, a run."""
    return f"{version.run}@{version.version}" if isinstance(version, Version) else version


def _leaves(section: type[msgspec.Struct], prefix: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values, also of nested sections."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(section)}
    for name, value in keys.items():
        kind = kinds.get(name)
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _leaves(kind, f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _value(key: str, value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(_builtin(key, value), ensure_ascii=False)


def _builtin(key: str, value: Any) -> Any:
    """Turn paths into text and numpy scalars into numbers, as JSON has them. Raises SpecError."""

    def plain(special: Any) -> Any:
        if isinstance(special, os.PathLike):
            return os.fspath(special)
        if callable(item := getattr(special, "item", None)):
            return item()
        raise NotImplementedError

    try:
        return msgspec.to_builtins(value, enc_hook=plain, str_keys=True)
    except (NotImplementedError, TypeError, ValueError):
        kind = type(value).__name__
        raise SpecError(f"a {kind} is nothing that a spec can hold", key=key, hint=_HINT) from None
