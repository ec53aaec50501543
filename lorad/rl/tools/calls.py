"""The forms in which models write calls of tools."""

from typing import Literal

CallForm = Literal["hermes", "llama", "mistral", "xml", "glm"]
"""How calls are written.

hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>`, of Qwen2.5, Qwen3 and Hermes.
llama: `{"name": …, "parameters": …}` as the whole turn, of Llama 3.1 and later.
mistral: `[TOOL_CALLS] [{…}]`, or `[TOOL_CALLS]name[ARGS]{…}`.
xml: `<tool_call><function=name><parameter=key>…`, of Qwen3-Coder, Qwen3.5 and Nemotron 3.
glm: `<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`, of GLM-4.5 and later.
"""
SPECIAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
"""Special tokens that are part of calls: who reads calls has to keep them when tokens become text."""
_FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<function=", "xml"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ('Respond in the format {"name": function name, "parameters"', "llama"),
)


def form_of(template: str | None) -> CallForm | None:
    """Return the form of a template's calls; None when it has no tools, or lorad does not read its form."""
    if template is None or "tools" not in template:
        return None
    return next((form for mark, form in _FORMS if mark in template), None)
