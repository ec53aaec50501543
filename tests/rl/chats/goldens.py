"""The goldens of tests/data/chat_goldens, as transformers makes them: `python -m tests.rl.chats.goldens`."""

import json
from typing import Any

from tests.rl.chats.reference import FAMILIES, GOLDENS, Sample, samples_of

_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm", "day": null}'},
}
_TOOL = {
    "name": "weather",
    "description": "How <wet> it is",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
_ASKED: dict[str, Any] = {"role": "user", "content": "How is it in Ülm? "}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "It rains. \n"}
_CALLING: list[dict[str, Any]] = [
    _ASKED,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "content": '{"rain": 1}'},
    _ANSWER,
]
ROWS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [_ASKED, _ANSWER]},
    "a system prompt": {"messages": [{"role": "system", "content": "Be brief."}, _ASKED, _ANSWER]},
    "turns that say no": {
        "messages": [_ASKED, _ANSWER | {"weight": 0}, _ASKED, _ANSWER, _ASKED, _ANSWER | {"train": False}]
    },
    "a call and its result": {"messages": _CALLING, "tools": [{"type": "function", "function": _TOOL}]},
    "a call with empty content": {"messages": [_ASKED, _CALLING[1] | {"content": ""}]},
    "thoughts": {
        "messages": [_ASKED, _ANSWER | {"content": "<think>\nhm\n</think>\n\nIt rains.", "thinking": "hm"}]
    },
    "thoughts of a turn before": {
        "messages": [_ASKED, _ANSWER | {"content": "<think>\nhm\n</think>\n\nWet."}, _ASKED, _ANSWER]
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Ulm"}, {"type": "text", "text": "now?"}]},
            _ANSWER,
        ]
    },
    "variables": {
        "messages": [_ASKED, _ANSWER],
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 May 2026"},
    },
}


def made(family: str) -> dict[str, list[Sample] | str | None]:
    """Return the samples of each row of a family; a text where its template refuses the row."""
    found: dict[str, list[Sample] | str | None] = {}
    for name, row in ROWS.items():
        try:
            found[name] = samples_of(row, family)
        except Exception as error:  # whatever a template raises
            found[name] = str(error)
    return found


def packed(samples: list[Sample] | str | None) -> Any:
    """Return samples as their file has them: token ids, and where spans begin and end that are trained."""
    if not isinstance(samples, list):
        return samples
    edges = [[i for i, on in enumerate([*mask, 0]) if on != ([0, *mask])[i]] for _, mask in samples]
    return [{"ids": ids, "edges": edge} for (ids, _), edge in zip(samples, edges, strict=True)]


def main() -> None:
    for family in FAMILIES:
        lines = [f"  {json.dumps(name)}: {json.dumps(packed(found))}" for name, found in made(family).items()]
        (GOLDENS / f"{family}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
