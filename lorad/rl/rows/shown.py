"""Finds in a chat what its chat template does not write."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # one of them is enough: they are copies
_MARKS = ("<think>", "</think>")  # content with these is rewritten by many templates
_SHOWN = 40  # characters


def unshown(
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    text: str,
    trained: Sequence[int] = (),
) -> str:
    """Return in words what a chat has that its text lacks; "" where the text has everything.

    The text ends with the last of the `trained` turns, and only that turn has to show the assistant's
    thoughts.
    """
    for tool in variables.get("tools", ()):
        if (name := tool["function"]["name"]) not in text:
            return f"tool {name}"
    place = 0
    end = trained[-1] + 1 if trained else len(messages)
    for number, message in enumerate(messages[:end], 1):
        for kind, words in _texts(message, is_last=bool(trained) and number == end):
            start = text.find(words, place)
            if start < 0 and words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
                return f"{kind} of message {number}, role {message['role']}: “{words[:_SHOWN]}”"
            place = max(place, start)
    return ""


def _texts(message: Mapping[str, Any], *, is_last: bool) -> Iterator[tuple[str, str]]:
    """Yield the texts of a message, each with the name of its key."""
    content = message.get("content") or ""
    thoughts = [thought for key in _THOUGHTS if (thought := message.get(key)) and isinstance(thought, str)]
    if is_last and thoughts:
        yield "thinking", thoughts[0].strip()
    for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
        is_rewritten = message["role"] == "assistant" and any(mark in part for mark in _MARKS)
        if part.strip() and not is_rewritten:
            yield "content", part.strip()
        elif is_last and _MARKS[1] in part:
            yield "thinking", part.partition(_MARKS[1])[0].rpartition(_MARKS[0])[2].strip()
    for call in message.get("tool_calls") or ():
        yield "call", call.get("function", call)["name"]
