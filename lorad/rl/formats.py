"""What a row of supervised data says: its chat and the turns of it that are trained."""

from typing import Any

from msgspec import Struct

from lorad.errors import SpecError
from lorad.rl.data import messages_of, value_of
from lorad.rl.sources import Row
from lorad.spec.algorithm import Kind
from lorad.spec.model import Data, DataFormat

_FORMATS: dict[Kind, tuple[DataFormat, ...]] = {"sft": ("messages", "completion")}
_KEYS: dict[DataFormat, tuple[str, ...]] = {
    "messages": ("messages_key",),
    "completion": ("prompt_key", "completion_key"),
}


class Turns(Struct, frozen=True):
    """A chat: the assistant's turns from message `first` on are trained."""

    messages: list[dict[str, Any]]
    first: int

    @property
    def trained(self) -> list[int]:
        """Return the places of the messages that are trained."""
        roles = enumerate(message["role"] for message in self.messages)
        return [place for place, role in roles if role == "assistant" and place >= self.first]


def format_of(row: Row, data: Data, kind: Kind) -> DataFormat:
    """Return the format of a dataset that begins with this row. Raises SpecError."""
    takes = _FORMATS[kind]
    if data.format != "auto":
        if data.format not in takes:
            raise SpecError(
                f"{data.format} is not what algorithm {kind} trains on",
                key="data.format",
                hint=f"Choose one of: auto, {', '.join(takes)}.",
            )
        return data.format
    for one in takes:
        if all(getattr(data, key) in row.values for key in _KEYS[one]):
            return one
    there = ", ".join(map(str, row.values)) or "nothing"
    wanted = " or ".join(" and ".join(getattr(data, key) for key in _KEYS[one]) for one in takes)
    raise SpecError(
        f"{row.where}: algorithm {kind} needs {wanted}; there is {there}",
        key="data.format",
        hint="data.messages_key, prompt_key and completion_key name the columns.",
    )


def turns_of(row: Row, data: Data, form: DataFormat) -> list[Turns]:
    """Return the chats of a row. Raises SpecError."""
    if form == "messages":
        value = value_of(row, data, "messages_key")
        if isinstance(value, str):
            raise SpecError(
                f"{row.where}: {data.messages_key} is text, not a list of messages",
                hint='Give {"role": …, "content": …} for each, or set data.format to completion.',
            )
        return [Turns(messages_of(value, row), 0)]
    prompt = messages_of(value_of(row, data, "prompt_key"), row)
    return [Turns([*prompt, *_said(value_of(row, data, "completion_key"), row)], len(prompt))]


def plain_of(row: Row, data: Data, form: DataFormat, why: str) -> tuple[str, list[str]]:
    """Return prompt and completions of a row as text, for a model without a template. Raises SpecError.

    why: the reason that there is no template.
    """
    keys = _KEYS[form]
    texts = [value_of(row, data, key) for key in keys]
    for key, text in zip(keys, texts, strict=True):
        if not isinstance(text, str):
            raise SpecError(
                f"{row.where}: {getattr(data, key)} is a list of messages but {why}",
                hint="Give prompt and completion as strings.",
            )
    if len(texts) == 1:
        raise SpecError(f"{row.where}: {getattr(data, keys[0])} is text", hint="Give prompt and completion.")
    return texts[0], texts[1:]


def _said(value: Any, row: Row) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return messages_of(value, row)
