"""Calls of tools in the text of a model's turn."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from lorad.records.episodes import ToolCall
from lorad.rl.tools.calls import CallForm

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_XML_BLOCK = re.compile(
    r"(?:<tool_call>|(?=<function=))(.*?)(?:</function>\s*</tool_call>|</function>|</tool_call>|\Z)",
    re.DOTALL,
)
_XML_NAME = re.compile(r"\s*<function=([^>\s]*)>")
_XML_ARGUMENT = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_MARKS: Mapping[CallForm, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "xml": ("<tool_call>", "<function="),
    "mistral": ("[TOOL_CALLS]",),
    "llama": ("<|python_tag|>", "{"),
}
_THOUGHT = "<think>"
_THOUGHT_END = "</think>"
_DECODER = json.JSONDecoder()
_MOST_ERROR = 200  # characters
_Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of the parameters of each tool, by name."""
_TextPart = tuple[int, int, list[ToolCall]]
"""Where a part of the text begins and ends, and the calls in it."""


class _ParsedTurn(Struct, frozen=True):
    """A turn of a model.

    text: The text outside of calls.
    calls: The calls in the order in which they were written, also the ones that cannot be made.
    """

    text: str
    calls: list[ToolCall]


def parse(text: str, form: CallForm, tools: Sequence[Mapping[str, Any]]) -> _ParsedTurn:
    """Read the calls in a turn outside of its thoughts. The tools have OpenAI's wrapped form."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        properties = tool["function"].get("parameters", {}).get("properties", {})
        schemas[tool["function"]["name"]] = properties if isinstance(properties, Mapping) else {}
    begin = _end_of_thought(text)
    outside_calls = [text[:begin]]
    calls = list[ToolCall]()
    end = begin
    for start, stop, inside in _READERS[form](text, begin, schemas):
        outside = text[end:start]
        outside_calls.append(outside if not calls or outside.strip() else "")
        calls += inside
        end = stop
    rest = text[end:]
    outside_calls.append(rest if not calls or rest.strip() else "")
    return _ParsedTurn("".join(outside_calls), calls)


class Splitter:
    """Splits a turn that arrives piece by piece: text outside of calls goes out at once."""

    def __init__(self, form: CallForm, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form = form
        self._tools = tools
        self._text = ""
        self._sent = 0

    def add(self, text: str) -> str:
        """Return what can be shown now."""
        self._text += text
        begin = _end_of_thought(self._text)
        if self._form == "llama":  # a call is the whole turn
            turn = self._text[begin:].lstrip()
            marks = _MARKS["llama"]
            is_call = any(turn.startswith(mark) or mark.startswith(turn) for mark in marks)
            certain = begin if not turn or is_call else len(self._text)
        else:
            behind = self._text[begin:]
            places = [place for mark in _MARKS[self._form] if (place := behind.find(mark)) >= 0]
            parts = [  # how many of the last characters may be the first ones of a mark
                next((size for size in range(len(mark) - 1, 0, -1) if behind.endswith(mark[:size])), 0)
                for mark in _MARKS[self._form]
            ]
            certain = begin + min([*places, *(len(behind) - part for part in parts)])
        end = max(self._sent, min(certain, len(self._text)))
        shown = self._text[self._sent : end]
        self._sent = end
        return shown

    def rest(self) -> _ParsedTurn:
        """Return what is left when the turn is over: text that was not shown yet, and the calls."""
        said = parse(self._text, self._form, self._tools)
        return _ParsedTurn(said.text[self._sent :], said.calls)


def _end_of_thought(text: str) -> int:
    place = text.find(_THOUGHT_END)
    if place >= 0:
        return place + len(_THOUGHT_END)
    return len(text) if text.lstrip().startswith(_THOUGHT) else 0


def _hermes(text: str, begin: int, tools: _Tools) -> list[_TextPart]:
    """Read JSON first: a string in it may have the mark of the end."""
    parts = []
    mark = _MARKS["hermes"][0]
    while (start := text.find(mark, begin)) >= 0:
        inside = start + len(mark)
        value, end, error = _json_at(text, inside)
        closed = text.find("</tool_call>", inside if error else end)
        stop = len(text) if closed < 0 else closed + len("</tool_call>")
        behind = text[end : len(text) if closed < 0 else closed]
        if not error and behind.strip():
            error = f"there is more behind its JSON: {behind.strip()[:_MOST_ERROR]}"
        parts.append((start, stop, [_call(value, error, text[start:stop], tools)]))
        begin = stop
    return parts


def _llama(text: str, begin: int, tools: _Tools) -> list[_TextPart]:
    """Read a turn that is JSON with a name, or several with `;` between them; other JSON is an answer."""
    start = len(text) - len(text[begin:].lstrip())
    place = start + len("<|python_tag|>") if text.startswith("<|python_tag|>", start) else start
    calls: list[ToolCall] = []
    while place < len(text) and text[place] == "{":
        value, end, error = _json_at(text, place)
        if error and not re.match(r'\{\s*"(name|type)"', text[place:]):
            return []
        if not error and not (isinstance(value, dict) and "name" in value):
            return []
        end = len(text) if error else end
        calls.append(_call(value, error, text[place:end], tools))
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    return [(start, place, calls)] if calls else []


def _mistral(text: str, begin: int, tools: _Tools) -> list[_TextPart]:
    mark = _MARKS["mistral"][0]
    parts = []
    while (start := text.find(mark, begin)) >= 0:
        place = start + len(mark)
        stop = text.find(mark, place) if text.find(mark, place) >= 0 else len(text)
        written = text[start:stop]
        named = _MISTRAL_NAME.match(text, place, stop)
        value, _, error = _json_at(text, named.end() if named else place)
        if named:
            calls = [_call({"name": named[1], "arguments": value}, error, written, tools)]
        elif error:
            calls = [_call(None, error, written, tools)]
        else:
            values = value if isinstance(value, list) else [value]
            calls = [_call(entry, "", written, tools) for entry in values]
        parts.append((start, stop, calls))
        begin = stop
    return parts


def _xml(text: str, begin: int, tools: _Tools) -> list[_TextPart]:
    parts = []
    for block in _XML_BLOCK.finditer(text, begin):
        named = _XML_NAME.match(block[1])
        if named is None:
            call = _call(None, "a call begins with <function=name>", block[0], tools)
        else:
            call = _call_of_texts(named[1], _XML_ARGUMENT.findall(block[1]), block[0], tools)
        parts.append((block.start(), block.end(), [call]))
    return parts


def _glm(text: str, begin: int, tools: _Tools) -> list[_TextPart]:
    parts = []
    for block in _BLOCK.finditer(text, begin):
        name = block[1].partition("<arg_key>")[0].strip()
        call = _call_of_texts(name, _GLM_ARGUMENT.findall(block[1]), block[0], tools)
        parts.append((block.start(), block.end(), [call]))
    return parts


_READERS: Mapping[CallForm, Callable[[str, int, _Tools], list[_TextPart]]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "xml": _xml,
    "glm": _glm,
}


def _json_at(text: str, place: int) -> tuple[Any, int, str]:
    """Return (value, where it ends, what was wrong) of the JSON at a place, white space before it aside."""
    place += len(text[place:]) - len(text[place:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        return None, place, f"it is no JSON: {getattr(error, 'msg', error)}"
    return value, end, ""


def _call(value: Any, error: str, written: str, tools: _Tools) -> ToolCall:
    """Make a call of its JSON, or of the error why that could not be read."""
    name = value.get("name") if isinstance(value, dict) else None
    named = name if isinstance(name, str) else ""
    if error:
        return ToolCall(named, None, f"the call cannot be read: {error}", "invalid_json", written)
    if not named:
        return ToolCall("", None, 'the call has no "name"', "invalid_json", written)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments, _, error = _json_at(arguments, 0)
    if error or not isinstance(arguments or {}, dict):
        why = error or "they are no JSON object"
        problem = f"the arguments of {named} cannot be read: {why}"
        return ToolCall(named, None, problem, "invalid_json", written)
    return _checked(named, arguments or {}, written, tools)


def _call_of_texts(name: str, texts: Sequence[tuple[str, str]], written: str, tools: _Tools) -> ToolCall:
    """Make a call of arguments that were written as text; what is no string by its schema is JSON."""
    arguments: dict[str, Any] = {}
    for key, text in texts:
        schema = tools.get(name, {}).get(key.strip())
        kinds: Any = []  # where nothing says what fits, a text does
        if isinstance(schema, Mapping):
            kinds = schema.get("type", [part.get("type") for part in schema.get("anyOf", []) if part])
        if not kinds or "string" in ([kinds] if isinstance(kinds, str) else kinds):
            arguments[key.strip()] = text
            continue
        value, end, error = _json_at(text, 0)
        if error or text[end:].strip():
            why = f"the argument {key.strip()} of {name} cannot be read: {error or 'it is no JSON'}"
            return ToolCall(name, None, why, "invalid_json", written)
        arguments[key.strip()] = value
    return _checked(name, arguments, written, tools)


def _checked(name: str, arguments: dict[str, Any], written: str, tools: _Tools) -> ToolCall:
    if name in tools:
        return ToolCall(name, arguments, written=written)
    names = ", ".join(sorted(tools)) or "none"
    problem = f"there is no tool {name!r}; there are: {names}"
    return ToolCall(name, arguments, problem, "unknown_tool", written)
