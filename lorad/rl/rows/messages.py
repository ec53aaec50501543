"""Chats in rows: messages as OpenAI writes them, and as ShareGPT does."""

import json
from collections.abc import Mapping
from typing import Any

from lorad.errors import SpecError
from lorad.rl.sources import Row
from lorad.rl.tools.specs import for_template
from lorad.spec.data import Data
from lorad.text import some_of

_SPEAKERS = {"human": "user", "gpt": "assistant"}  # of ShareGPT
ROLES = ("system", "developer", "user", "assistant", "tool")
TRAINED_KEYS = ("weight", "loss", "train", "trainable", "training", "loss_mask")
"""Keys by which OpenAI, ms-swift, axolotl, slime and verl say whether a message is trained."""
_SAID_BESIDE = ("tool_calls", "thinking", "reasoning_content", "reasoning")  # where content may be null
_TEXT_PARTS = ("text", "input_text", "output_text", None)
_MESSAGE = 'A message is {"role": "user", "content": "…"}.'


def messages_of(value: Any, row: Row, what: str = "the prompt") -> list[dict[str, Any]]:
    """Return a list, or a text that is one as JSON, as messages, and another text as what a user says.

    A key that is null is left out, and so are the keys that say whether a message is trained. Raises
    SpecError, which calls it `what`.
    """
    chat = chat_in(value) if isinstance(value, str) else as_written(value, row)
    if isinstance(chat, str):
        return [{"role": "user", "content": chat}]
    if not isinstance(chat, list):
        raise SpecError(f"{row.where}: {what} is neither a string nor a list of messages", hint=_MESSAGE)
    if not chat:
        raise SpecError(f"{row.where}: {what} is an empty list", hint=_MESSAGE)
    return [
        _message(message, f"{row.where}: message {place} of {what}") for place, message in enumerate(chat, 1)
    ]


def chat_in(value: Any) -> Any:
    """Return the messages that a text is as JSON, as in files of tables; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return messages if messages and is_chat(messages) else value


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, as OpenAI or ShareGPT has them."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in value
    )


def as_written(value: Any, row: Row) -> Any:
    """Return a value of a row without the nulls of keys that other rows have, which a table fills in."""
    return _without_null(value) if row.is_of_columns else value


def with_system(data: Data, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages behind `data.system`, unless they begin with a system prompt of their own."""
    if data.system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": data.system}, *messages]


def is_trained(message: Mapping[str, Any], where: str) -> bool:
    """Return whether a message is trained: it is unless one of its keys says no.

    Raises SpecError, which begins with `where`, for a key that is neither yes nor no.
    """
    for key in TRAINED_KEYS:
        value = message.get(key)
        if isinstance(value, list | dict | str) or value not in (None, 0, 1):
            hint = "A message is trained or it is not: lorad weighs no part of one."
            raise SpecError(f"{where} has {key} {value!r:.40}, which is neither 0 nor 1", hint=hint)
    return not any(message.get(key) in (0, False) for key in TRAINED_KEYS)


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


def _message(value: Any, where: str) -> dict[str, Any]:
    """Return a message as chat templates take it. Raises SpecError, which begins with `where`."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} is {type(value).__name__}, not an object", hint=_MESSAGE)
    is_trained(value, where)
    message = {key: entry for key, entry in value.items() if entry is not None and key not in TRAINED_KEYS}
    if message.get("role") is None and isinstance(message.get("from"), str):
        speaker = message.pop("from")  # ShareGPT's message becomes OpenAI's
        message |= {"role": _SPEAKERS.get(speaker, speaker), "content": message.pop("value", None)}
        if message["role"] not in ROLES:
            raise SpecError(
                f"{where} is ShareGPT's and from {speaker!r}, which is no role",
                hint="Speakers are human, gpt and system. Write a call of a tool as tool_calls of an "
                'assistant\'s message, and its result as a message of the role "tool".',
            )
    if not isinstance(message.get("role"), str):
        raise SpecError(f"{where} has no role; there is {some_of(message)}", hint=_MESSAGE)
    if call := message.pop("function_call", None):  # as OpenAI wrote calls before tool_calls
        message["tool_calls"] = [{"type": "function", "function": call}]
    message["role"] = "tool" if message["role"] == "function" else message["role"]
    content = message.setdefault("content", None)
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if (
                not isinstance(part, Mapping)
                or kind not in _TEXT_PARTS
                or not isinstance(part.get("text"), str)
            ):
                raise SpecError(f"{where} has a part of type {kind}", hint="lorad trains on text alone.")
    elif content is None and not any(message.get(key) for key in _SAID_BESIDE):
        raise SpecError(f"{where} has no content", hint=f"{_MESSAGE} A call has tool_calls.")
    elif content is not None and not isinstance(content, str):
        raise SpecError(f"{where} has content that is no text: {content!r:.60}", hint=_MESSAGE)
    try:
        return for_template([message])[0]
    except SpecError as error:
        raise SpecError(f"{where}: {error.problem}", hint=error.hint) from None
