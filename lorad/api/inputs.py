"""What a Python user gives, as the daemon takes it: specs, keys of a spec, names of versions."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lorad.client.overrides import from_here
from lorad.client.spec_file import read_spec
from lorad.errors import SpecError
from lorad.records.versions import Version

Spec = str | os.PathLike[str] | Mapping[str, Any]
_FILES = (".yaml", ".yml", ".json")
_PLAIN = re.compile(r"[A-Za-z_./][\w./@+\-]*(:[\w./@+\-]+)?")  # a text that YAML reads as the same text
_WORDS = ("null", "true", "false", "inf", "nan", ".inf", ".nan")
_HINT = 'Give a file ("run.yaml"), its text, or a dict: {"data": {"train": "sort"}}.'


class _SpecText(NamedTuple):
    """The text of a spec, its name in messages, and where its relative paths begin."""

    text: str
    source: str
    cwd: str


def spec_text(spec: Spec) -> _SpecText:
    """Read a spec: a dict, the text of one (of several lines, or with `: `), or else the name of a file.

    Raises SpecError for a file that cannot be read, and for values that YAML does not have.
    """
    if isinstance(spec, Mapping):
        return _SpecText(_yaml(spec), "spec", str(Path.cwd()))
    name = os.fspath(spec)
    if isinstance(spec, str) and not name.lower().endswith(_FILES) and ("\n" in name or ": " in name):
        return _SpecText(name, "spec", str(Path.cwd()))
    if not name or name == "-":
        raise SpecError("there is no spec", hint=_HINT)
    text, source, cwd = read_spec(name)
    return _SpecText(text, source, str(cwd))


def overrides(keys: Mapping[str, Any]) -> list[str]:
    """Make `key=value` of keys of a spec. A dict of a section changes the keys that it has and no others.

    Relative paths begin at the working directory. Raises SpecError for values that YAML does not have.
    """
    from lorad.spec.model import Spec as Sections  # slow, and not needed where nothing is overridden

    return from_here([f"{key}={_value(key, value)}" for key, value in _leaves(Sections, "", keys)])


def axes(grid: Mapping[str, Iterable[Any]]) -> list[str]:
    """Make `key=a,b` of keys and their values. Raises SpecError for a key without values."""
    made = []
    for key, values in grid.items():
        found = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
        if not found:
            raise SpecError("a grid has a list of values for each key", key=key, hint=f"{key!r}: [a, b]")
        made.append(f"{key}={','.join(_value(key, value) for value in found)}")
    return from_here(made)


def version_name(version: str | Version) -> str:
    """Return run@number of a version, or the name that was given: an alias, run@best, a run."""
    return f"{version.run}@{version.version}" if isinstance(version, Version) else version


def _leaves(section: type[msgspec.Struct], prefix: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kinds = {field.name: field.type for field in msgspec.structs.fields(section)}
    for name, value in keys.items():
        kind = kinds.get(name)
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _leaves(kind, f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _value(key: str, value: Any) -> str:
    """Write a value as YAML in one line."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(_builtin(key, value), ensure_ascii=False)


def _yaml(spec: Mapping[str, Any]) -> str:
    import yaml

    plain = {str(key): _builtin(str(key), value) for key, value in spec.items()}
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _builtin(key: str, value: Any) -> Any:
    """Return what JSON has: paths become text, and scalars of numpy numbers. Raises SpecError."""

    def other(given: Any) -> Any:
        if isinstance(given, os.PathLike):
            return os.fspath(given)
        if callable(item := getattr(given, "item", None)):
            return item()
        raise NotImplementedError

    try:
        return msgspec.to_builtins(value, enc_hook=other, str_keys=True)
    except (NotImplementedError, TypeError, ValueError):
        kind = type(value).__name__
        raise SpecError(f"a {kind} is nothing that a spec can hold", key=key, hint=_HINT) from None
