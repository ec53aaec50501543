"""Variables of the chat template that a row brings: its tools, and its chat_template_kwargs."""

import json
from collections.abc import Mapping
from typing import Any

from lorad.errors import SpecError
from lorad.rl.rows.messages import as_written
from lorad.rl.sources import Row
from lorad.rl.tools.specs import in_function

TOOLS = ("tools", "functions")
SETTINGS = "chat_template_kwargs"


def variables_of(row: Row) -> dict[str, Any]:
    """Return the variables that a row has beside its messages, or in the column `input` with them.

    A column is a list or its JSON; other columns are about something else. Raises SpecError for a nameless
    tool.
    """
    settings = column_of(row, SETTINGS)
    variables = dict(settings) if isinstance(settings, Mapping) else {}
    tools = next((value for name in TOOLS if is_of_tools(value := column_of(row, name))), None)
    for place, tool in enumerate(tools or (), 1):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            hint = 'A tool is {"type": "function", "function": {"name": …, "parameters": {JSON schema}}}.'
            raise SpecError(f"{row.where}: tool {place} has no name", hint=hint)
    if tools:
        variables["tools"] = [in_function(tool) for tool in tools]
    return variables


def column_of(row: Row, name: str) -> Any:
    """Return a column of the row, or of its column `input`, read where it is JSON in a text."""
    beside = row.values.get("input")
    value = row.values.get(name) or (beside.get(name) if isinstance(beside, Mapping) else None)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return as_written(value, row)


def is_of_tools(value: Any) -> bool:
    """Return whether a column is a list of tools."""
    return isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
