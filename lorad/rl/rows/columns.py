"""The columns that the section `data` of a spec names, in a row."""

import json
import re
from collections.abc import Mapping
from typing import Any

from lorad.errors import SpecError
from lorad.rl.rows.forms import advice
from lorad.rl.sources import Row
from lorad.spec.data import Data
from lorad.text import some_of

_ELSEWHERE = {  # where rows of verl and SkyRL have the answer, of ShareGPT the chat, of OpenAI preferences
    "answer_key": ("reward_model.ground_truth", "reward_spec.ground_truth"),
    "messages_key": ("conversations",),
    "prompt_key": ("input.messages",),
    "chosen_key": ("preferred_output",),
    "rejected_key": ("non_preferred_output",),
}
_USUAL = Data()
_EXACT = 2**53  # from here on, floats leave out whole numbers
_IN_BRACES = re.compile(r"\{([\w.-]+)\}")


def prompt_of(row: Row, data: Data) -> Any:
    """Return a text, or what a row has for a list of messages. Raises SpecError."""
    if data.prompt_format is None:
        return value_of(row, data, "prompt_key")

    def column(name: re.Match[str]) -> str:
        if (value := _look_up(row.values, name[1])) is None:
            problem = f"{row.where}: data.prompt_format names {name[1]!r}, which the row does not have"
            raise SpecError(problem, hint=f"There is {some_of(row.values)}.")
        return text_of(value)

    return _IN_BRACES.sub(column, data.prompt_format)


def value_of(row: Row, data: Data, setting: str) -> Any:
    """Return the value of the column that `setting` names. Raises SpecError."""
    if (value := find_value(row, data, setting)) is None:
        key = getattr(data, setting)
        what = "is null" if key in row.values else "is missing"
        hint = f"Set data.{setting} to another."
        if setting == "prompt_key":
            hint = advice("prompt", row.values, hint)
        raise SpecError(f"{row.where}: the key {key!r} {what}; there is {some_of(row.values)}", hint=hint)
    return value


def find_value(row: Row, data: Data, setting: str) -> Any:
    """Return the value of a column, or None. `a.b` is the key b of the column a, unless a column is named so.

    Unless the setting names another place than by default, it is looked for where others have it, too.
    """
    key = getattr(data, setting)
    others = _ELSEWHERE.get(setting, ()) if key == getattr(_USUAL, setting) else ()
    for name in (key, *others):
        if (value := _look_up(row.values, name)) is not None:
            return value
    return None


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    value: Any = values
    for part in [name] if name in values else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def text_of(answer: Any) -> str:
    """Return a value as text: letters as they are, and a whole number without the `.0` of a data frame."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer)) if abs(answer) < _EXACT else json.dumps(answer)
    if answer is None or isinstance(answer, bool | int | float | list | dict):
        return json.dumps(answer, ensure_ascii=False, default=str)
    return str(answer)
