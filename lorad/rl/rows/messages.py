"""Chats in rows: messages as OpenAI writes them, and as ShareGPT does."""

from collections.abc import Mapping
from typing import Any

from lorad.errors import SpecError
from lorad.rl.sources import Row
from lorad.rl.tools.specs import for_template
from lorad.text import some_of

_SPEAKERS = {"human": "user", "gpt": "assistant"}  # of ShareGPT
ROLES = ("system", "developer", "user", "assistant", "tool")
_SAID_BESIDE = ("tool_calls", "thinking", "reasoning_content")  # where content may be null
_MESSAGE = 'A message is {"role": "user", "content": "…"}.'


def messages_of(value: Any, row: Row, what: str = "the prompt") -> list[dict[str, Any]]:
    """Return a text as what a user says, and a list as messages. what: the name of it in errors.

    Raises SpecError.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise SpecError(f"{row.where}: {what} is neither a string nor a list of messages", hint=_MESSAGE)
    if not value:
        raise SpecError(f"{row.where}: {what} is an empty list", hint=_MESSAGE)
    return [
        _message(message, f"{row.where}: message {place} of {what}") for place, message in enumerate(value, 1)
    ]


def _message(value: Any, where: str) -> dict[str, Any]:
    """Return a message with its content as one text. where: begins an error. Raises SpecError."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} is {type(value).__name__}, not an object", hint=_MESSAGE)
    message = dict(value)
    if message.get("role") is None and isinstance(message.get("from"), str):
        message = _of_sharegpt(message, where)
    if not isinstance(message.get("role"), str):
        raise SpecError(f"{where} has no role; there is {some_of(message)}", hint=_MESSAGE)
    content = message.setdefault("content", None)
    if isinstance(content, list):
        if kinds := [_kind(part) for part in content if not isinstance(_text_of(part), str)]:
            raise SpecError(f"{where} has a part of type {kinds[0]}", hint="lorad trains on text alone.")
        content = message["content"] = "\n".join(part["text"] for part in content)  # as vLLM has it
    if content is None and not any(message.get(key) for key in _SAID_BESIDE):
        raise SpecError(f"{where} has no content", hint=f"{_MESSAGE} A call has tool_calls.")
    if content is not None and not isinstance(content, str):
        raise SpecError(f"{where} has content that is no text: {content!r:.60}", hint=_MESSAGE)
    try:
        return for_template([message])[0]
    except SpecError as error:
        raise SpecError(f"{where}: {error.problem}", hint=error.hint) from None


def _of_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Raises SpecError where the speaker has no role."""
    speaker, said = message.pop("from"), message.pop("value", None)
    role = _SPEAKERS.get(speaker, speaker)
    if role not in ROLES:
        raise SpecError(
            f"{where} is ShareGPT's and from {speaker!r}, which is no role",
            hint="Speakers are human, gpt and system. Write a call of a tool as tool_calls of an assistant's "
            'message, and its result as a message of the role "tool".',
        )
    return {**message, "role": role, "content": said}


def _text_of(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) else None


def _kind(part: Any) -> str:
    return str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
