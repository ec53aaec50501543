"""Make the grid of a sweep from overrides of which some have several values: `trainer.lr=1e-4,3e-4`. Pure.

Commas inside brackets, braces and quotes belong to a value. A key that takes a list takes one in brackets
here, as a comma may separate its items elsewhere.
"""

import itertools
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec

from lorad.bounds import POINTS
from lorad.errors import SpecError
from lorad.spec.model import Spec
from lorad.spec.text import key_of_override, refuse_long

_CLOSES = {"[": "]", "{": "}"}

Axes = dict[str, list[str]]
"""Maps each key to the texts of its values."""


def points_of(axes: Axes) -> list[list[str]]:
    """List the overrides of each point: every value of each key with every value of the others, the last key
    changing first. Raises SpecError for more than POINTS.
    """
    points = [
        [f"{key}={value}" for key, value in zip(axes, values, strict=True)]
        for values in itertools.islice(itertools.product(*axes.values()), POINTS + 1)
    ]
    if len(points) > POINTS:
        hint = "Leave out some values, or sweep twice."
        raise SpecError(f"the grid has more than {POINTS} points", hint=hint)
    return points


def overridden_values(text: str) -> tuple[str, list[str]]:
    """Split an override into its key and its values. Raises SpecError."""
    refuse_long(text)
    first, equals, rest = text.partition("=")
    values = list(split(rest))
    if not equals or len(values) < 2:
        return key_of_override(text), [rest]
    key = key_of_override(f"{first}={values[0]}")
    if len(values) > POINTS:
        raise SpecError(f"{key} has more than {POINTS} values", hint="Leave out some, or sweep twice.")
    if not all(values):
        hint = "Leave one of the commas out, or quote it."
        raise SpecError(f"override {text}: a value is empty", hint=hint)
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise SpecError(f"override {text}: {twice[0]} is there twice", hint="Give each value once.")
    if _takes_list(key) and not all(value.startswith("[") for value in values):
        raise SpecError(
            f"override {text}: {key} takes a list, so this may be one list or several values",
            hint=f"Put each list into brackets: {key}=[{values[0].strip('[]')}],[{values[1].strip('[]')}] "
            f"are two values, {key}=[{rest}] is one.",
        )
    return key, values


def split(text: str) -> Iterator[str]:
    """Yield the parts between commas that are in no brackets, braces or quotes."""
    start = 0
    open_: list[str] = []
    quote = ""
    is_blank = True  # this part has only white space so far
    for place, letter in enumerate(text):
        was_blank = is_blank
        is_blank = is_blank and letter.isspace()
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and was_blank:  # else it is an apostrophe
            quote = letter
        elif letter in _CLOSES:
            open_.append(_CLOSES[letter])
        elif open_ and letter == open_[-1]:
            open_.pop()
        elif letter == "," and not open_:
            yield text[start:place].strip()
            start = place + 1
            is_blank = True
    yield text[start:].strip()


def _takes_list(key: str) -> bool:
    """Check whether a value of `key` may be a list."""
    kind: Any = Spec
    for part in key.split("."):
        sections = [
            k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, msgspec.Struct)
        ]
        fields = {field.name: field.type for section in sections for field in msgspec.structs.fields(section)}
        if part not in fields:
            return False
        kind = fields[part]
    return any(get_origin(k) in (list, tuple) for k in _nested(kind))


def _nested(kind: Any) -> Iterator[Any]:
    """Yield a type, and those that it is made of."""
    yield kind
    if get_origin(kind) not in (list, tuple):
        for inner in get_args(kind):
            yield from _nested(inner)
