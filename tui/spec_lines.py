"""A spec as lines of YAML, each with its key: in the order of `lorad.spec.model`, and beside another spec.

A *flat* spec is {dotted key: value}, with what has no keys of its own in the spec (lists, `engine_args`) as
one value.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lorad.errors import SpecError
from lorad.spec.model import Spec
from lorad.spec.reward import RewardSpec
from lorad.spec.yaml import compose, plain

Flat = dict[str, Any]  # a value is whatever YAML has at that key
SAME = " "
ADDED = "+"
GONE = "-"
OTHER = "~"


@dataclass(frozen=True)
class SpecLine:
    """A line of a spec.

    Attributes:
        key: The dotted key of a section or a value.
        sign: How the line differs from the other spec.
        before: The value in the other spec, or the default where that has none.
    """

    key: str
    text: str
    sign: str = SAME
    before: str = ""


def flat(data: Mapping[str, Any]) -> Flat:
    """Flatten values in the spec's order; unknown keys come last."""
    leaves = dict(_leaves(data, _DEFAULT_SPEC, ""))
    return {key: leaves[key] for key in sorted(leaves, key=lambda key: _ORDER.get(key, len(_ORDER)))}


def _leaves(data: Mapping[str, Any], shape: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        inner = shape.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and inner:
            yield from _leaves(value, inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


_DEFAULT_SPEC: dict[str, Any] = msgspec.to_builtins(Spec())  # nested: sections are dicts, values anything
_ORDER: dict[str, int] = {
    key: place for place, (key, _) in enumerate(_leaves(_DEFAULT_SPEC, _DEFAULT_SPEC, ""))
}
DEFAULTS: Flat = flat(_DEFAULT_SPEC)
_OF_A_REWARD: Flat = json.loads(msgspec.json.encode(RewardSpec(name="")))
del _OF_A_REWARD["name"]


def nested(values: Flat) -> Flat:
    """Nest what `flat` flattened."""
    data: Flat = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return data


def differing(values: Flat, others: Flat = DEFAULTS) -> Flat:
    """Return what differs from `others`; of a reward written out, the keys that differ from its defaults."""
    return {key: brief(value) for key, value in values.items() if key not in others or others[key] != value}


def brief(value: Any) -> Any:
    """Return a value without those keys of rewards in it that have their defaults: it reads as the same."""
    if isinstance(value, list):
        return [brief(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    usual = _OF_A_REWARD if value.keys() == {"name", *_OF_A_REWARD} else {}
    return {key: brief(inner) for key, inner in value.items() if key not in usual or usual[key] != inner}


def text_of(values: Flat) -> str:
    """Return YAML that reads as `values` again."""
    return "".join(f"{line.text}\n" for line in lines(values))


def lines(after: Flat, before: Flat | None = None) -> list[SpecLine]:
    """Return the lines of `after`; with `before`, the lines of both with signs."""
    keys = flat(nested({**(before or {}), **after}))
    result: list[SpecLine] = []
    sections: list[str] = []
    for key in keys:
        *inside, last = key.split(".")
        for depth, section in enumerate(inside):
            if sections[: depth + 1] != inside[: depth + 1]:
                result.append(SpecLine(".".join(inside[: depth + 1]), f"{'  ' * depth}{section}:"))
        sections = inside
        head = f"{'  ' * len(inside)}{_scalar(last)}"
        base = after if before is None else before
        text = f"{head}: {value_text(after[key] if key in after else base[key])}"
        if key not in after:
            line = SpecLine(key, text, GONE)
        elif key not in base:
            line = SpecLine(key, text, ADDED, "" if DEFAULTS.get(key) is None else value_text(DEFAULTS[key]))
        elif base[key] != after[key]:
            line = SpecLine(key, text, OTHER, value_text(base[key]))
        else:
            line = SpecLine(key, text)
        result.append(line)
    return result


# -- values --------------------------------------------------------------------------------------------------
_PLAIN = re.compile(r"[\w./~][\w./~@+*=-]*")
_PLAIN_ALONE = re.compile(r"[\w./~][\w./~@+*=-]*(?::[\w./~@+*=-]+)*")


def value_text(value: Any) -> str:
    """Write a value on one line, as it stands after `key: ` or `key=`."""
    return _scalar(value, _PLAIN_ALONE) if not isinstance(value, list | tuple | dict) else inner_text(value)


def inner_text(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_scalar(str(key))}: {inner_text(inner)}" for key, inner in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inner_text, value)) + "]"
    return _scalar(value)


def _scalar(value: Any, bare: re.Pattern[str] = _PLAIN) -> str:
    """Write a value that has no parts; text is quoted where YAML would read something else.

    bare: what may stand without quotes.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return re.sub(r"e([-+])0(\d)$", r"e\1\2", repr(value))
    if not isinstance(value, str):
        return str(value)
    with contextlib.suppress(SpecError):
        node = compose(value, "") if bare.fullmatch(value) else None
        if node is not None and plain(node, "") == value:
            return value
    return quoted(value)


def quoted(text: str) -> str:
    """Quote in double quotes, with everything escaped that is not printable."""
    escaped = ""
    for char in json.dumps(text, ensure_ascii=False):
        code = ord(char)
        escaped += char if char.isprintable() else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return escaped


def words(values: Flat) -> Iterable[str]:
    """Return values as overrides: key=value."""
    return (f"{key}={value_text(value)}" for key, value in values.items())
