"""What a row says that holds completions: its chats, and the turns of them that are trained."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from msgspec import Struct

from lorad.errors import SpecError
from lorad.rl.rows.columns import find_value, prompt_of, value_of
from lorad.rl.rows.forms import advice
from lorad.rl.rows.messages import chat_in, is_chat, is_trained, messages_of
from lorad.rl.sources import Row
from lorad.spec.algorithm import Algorithm
from lorad.spec.data import Data, DataFormat
from lorad.text import some_of

_KEYS: dict[DataFormat, tuple[str, ...]] = {
    "messages": ("messages_key",),
    "completion": ("prompt_key", "completion_key"),
    "preference": ("chosen_key", "rejected_key"),
    "labels": ("prompt_key", "completion_key", "label_key"),
}


class ChatTurns(Struct, frozen=True):
    """A chat.

    trained: The places of the assistant's messages that are trained.
    left_out: How many of the assistant's messages say that they are not trained.
    """

    messages: list[dict[str, Any]]
    trained: list[int]
    left_out: int = 0


def format_of(row: Row, data: Data, algorithm: Algorithm) -> DataFormat:
    """Return the format of a dataset that begins with this row. Raises SpecError."""
    takes: tuple[DataFormat, ...] = ("messages", "completion")
    kind = str(algorithm.name)
    if algorithm.kind == "preference":
        takes = ("labels",) if algorithm.preference.loss == "kto" else ("preference",)
        kind = f"{kind} with loss {algorithm.preference.loss}"
    if data.format != "auto":
        if data.format not in takes:
            problem = f"{data.format} is not what algorithm {kind} trains on"
            raise SpecError(problem, key="data.format", hint=f"Choose one of: auto, {', '.join(takes)}.")
        return data.format
    for has in (_is_named, _has):
        for form in takes:
            if all(has(row, data, key) for key in _KEYS[form]):
                return form
    needed = " or ".join(" and ".join(getattr(data, key) for key in _KEYS[form]) for form in takes)
    key, hint = _missing(row, data, takes)
    problem = f"{row.where}: algorithm {kind} needs {needed}; there is {some_of(row.values)}"
    raise SpecError(problem, key=key, hint=advice(takes[-1], row.values, hint))


def _missing(row: Row, data: Data, takes: Sequence[DataFormat]) -> tuple[str, str]:
    """Return the key whose column the row lacks for the format that it is nearest to, and how to set it."""
    lacks = {form: [key for key in _KEYS[form] if not _has(row, data, key)] for form in takes}
    nearest = min(takes, key=lambda form: len(lacks[form]) / len(_KEYS[form]))
    first = lacks[nearest][0]
    chats = [name for name, value in row.values.items() if is_chat(chat_in(value))]
    if "messages" in takes and chats:
        return "data.messages_key", f"{chats[0]} is a chat: set data.messages_key to {chats[0]}."
    if len(lacks[nearest]) == len(_KEYS[nearest]):
        ways = (" and ".join(f"data.{key}" for key in _KEYS[form]) for form in takes)
        return "data", f"Set {', or '.join(ways)}, to the columns that have them."
    used = {data.prompt_key, *(getattr(data, key) for key in _KEYS[nearest])}
    free = [name for name in row.values if name not in used]
    example = f": data.{first}={free[0]}" if len(free) == 1 else ""
    return f"data.{first}", f"Set data.{first} to the column that has it{example}."


def _is_named(row: Row, data: Data, key: str) -> bool:
    """Return whether a row has the column that a key names, even if it is null."""
    return getattr(data, key) in row.values


def _has(row: Row, data: Data, key: str) -> bool:
    """Return whether a row has what a key names, also within a column or where other programs have it."""
    is_made = key == "prompt_key" and data.prompt_format is not None
    return is_made or _is_named(row, data, key) or find_value(row, data, key) is not None


def turns_of(row: Row, data: Data, form: DataFormat) -> list[ChatTurns]:
    """Return the chats of a row, of preferences the chosen one first. Raises SpecError."""
    match form:
        case "messages":
            value = value_of(row, data, "messages_key")
            if isinstance(chat := chat_in(value), str):
                raise SpecError(
                    f"{row.where}: {data.messages_key} is text, not a list of messages",
                    hint='Give {"role": …, "content": …} for each, or set data.format to completion.',
                )
            return [_turns([], messages_of(value, row, data.messages_key), chat)]
        case "preference":
            completions = [_completion(row, data, key) for key in ("chosen_key", "rejected_key")]
            if all(messages[0]["role"] != "assistant" for messages, _ in completions):
                # trained from where they differ, at the latest from the end of the shorter
                pairs = zip(*(messages[:-1] for messages, _ in completions), strict=False)
                common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                return [
                    _turns(messages[:common], messages[common:], value[common:])
                    for messages, value in completions
                ]
        case _:
            completions = [_completion(row, data, "completion_key")]
    prompt = messages_of(prompt_of(row, data), row)
    return [_turns(prompt, messages, value) for messages, value in completions]


def _turns(prompt: list[dict[str, Any]], messages: list[dict[str, Any]], value: Any) -> ChatTurns:
    """Return a chat that trains the assistant's `messages`, unless they say no in `value`, their column."""
    says = [is_trained(message, "") for message in value] if isinstance(value, list) else [True]
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [len(prompt) + place for place in answers if says[place]]
    return ChatTurns([*prompt, *messages], trained, len(answers) - len(trained))


def label_of(row: Row, data: Data) -> bool:
    """Return whether a completion is desired. Raises SpecError."""
    value = value_of(row, data, "label_key")
    if isinstance(value, str):  # as in CSV
        value = {"true": True, "false": False}.get(value.lower(), value)
    if value not in (True, False):
        raise SpecError(f"{row.where}: {data.label_key} is {value!r}", hint="Give true or false.")
    return bool(value)


def plain_of(row: Row, data: Data, form: DataFormat, why: str) -> tuple[str, list[str]]:
    """Return prompt and completions of a row as text, as there is no template: `why`. Raises SpecError."""
    sides = {"preference": ["chosen_key", "rejected_key"]}.get(form, ["completion_key"])
    keys = ["messages_key"] if form == "messages" else ["prompt_key", *sides]
    texts = [prompt_of(row, data) if key == "prompt_key" else value_of(row, data, key) for key in keys]
    for key, text in zip(keys, texts, strict=True):
        if not isinstance(text, str) or len(texts) == 1:
            hint = "Give prompt and completion as strings."
            raise SpecError(f"{row.where}: {getattr(data, key)} is a list of messages but {why}", hint=hint)
    return texts[0], texts[1:]


def _completion(row: Row, data: Data, key: str) -> tuple[list[dict[str, Any]], Any]:
    """Return a completion as messages, and the value that the row has for them. Raises SpecError."""
    value = value_of(row, data, key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}], value
    value = [value] if isinstance(value, dict) else value
    return messages_of(value, row, getattr(data, key)), value
