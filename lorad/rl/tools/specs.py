"""Descriptions of tools in OpenAI's form, from Python functions or as somebody wrote them."""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from lorad.errors import SpecError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HINT = 'Write {"type": "function", "function": {"name": …, "description": …, "parameters": {JSON schema}}}.'
_CALL = 'Write {"id": …, "type": "function", "function": {"name": …, "arguments": "{…}"}}.'
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.+)")
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")


def tool_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function by its name, docstring and type hints.

    The docstring's text before its first section is the description; lines `name: words` under `Args:`
    describe parameters. Raises SpecError for a parameter without a type, or of one that JSON
    does not have.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, about = _read_docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise _refused(name, str(error)) from error
    properties = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _refused(name, f"*{parameter.name} takes any number of values")
        if parameter.name not in hints:
            raise _refused(name, f"{parameter.name} has no type")
        try:
            schema = msgspec.json.schema(hints[parameter.name])
        except (TypeError, RecursionError) as error:
            raise _refused(name, f"{parameter.name}: {error}") from None
        if "enum" in schema and all(isinstance(value, str) for value in schema["enum"]):
            schema = {"type": "string", **schema}
        words = about.get(parameter.name)
        properties[parameter.name] = schema if words is None else {**schema, "description": words}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return wrapped({"name": name, "description": description, "parameters": parameters})


def wrapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the wrapped form, in which chat templates show tools. Raises SpecError."""
    function = tool.get("function", tool) if tool.get("type", "function") == "function" else None
    if not isinstance(function, Mapping):
        raise SpecError(f"a tool of type {tool.get('type')!r} is no function", hint=_HINT)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{name!r} is no name of a tool: letters, digits, _, . and - only", hint=_HINT)
    if not isinstance(function.get("parameters", {}), Mapping):
        raise SpecError(f"the parameters of tool {name} are no JSON schema", hint=_HINT)
    return in_function(tool)


def in_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with its description under `function`, where it may be already."""
    return (
        {"type": "function", **tool} if "function" in tool else {"type": "function", "function": dict(tool)}
    )


def wrapped_all(tools_: Sequence[Any]) -> list[dict[str, Any]]:
    """Return functions and mappings in the wrapped form. Raises SpecError; also when two have one name."""
    tools = [wrapped(tool) if isinstance(tool, Mapping) else tool_of(tool) for tool in tools_]
    names = [tool["function"]["name"] for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SpecError(f"two tools have the name {twice[0]}", hint="Give each tool a name of its own.")
    return tools


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates want them: no nulls, and arguments as objects. Raises SpecError."""
    return [
        {
            key: _read_calls(value) if key == "tool_calls" else value
            for key, value in message.items()
            if value is not None and (value or key != "tool_calls")
        }
        for message in messages
    ]


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise SpecError("tool_calls is no list of calls", hint=_CALL)
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SpecError("tool_calls: a call needs a function with a name", hint=_CALL)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise _bad_arguments(function["name"], f"are no JSON: {error}") from None
        if not isinstance(arguments, Mapping):
            raise _bad_arguments(function["name"], "are no JSON object")
        read.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return read


def _bad_arguments(name: str, why: str) -> SpecError:
    return SpecError(f"tool_calls: the arguments of {name} {why}", hint='Write them as "{\\"key\\": value}".')


def _refused(tool: str, why: str) -> SpecError:
    return SpecError(
        f"tool {tool} cannot be described to a model: {why}",
        hint="Give each parameter a type: str, int, float, bool, list[…], dict[str, …], Literal, or None.",
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return (description, words about each parameter)."""
    description: list[str] = []
    about: dict[str, str] = {}
    section = ""
    last = ""  # the parameter that was described last
    for line in text.splitlines():
        if heading := _SECTION.match(line.strip()):
            section = heading[1]
            last = ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            entry = _ENTRY.match(line.strip())
            if entry:
                last = entry[1]
                about[last] = entry[2]
            elif last:
                about[last] += " " + line.strip()
    return " ".join("\n".join(description).split()), about
